"""The operator's configuration: files, flags, what is refused, and what the documentation shows."""

import json
import re
from pathlib import Path

import pytest
from support.serving import answered, serving

from megakernel.config import ConfigError
from megakernel.families import read_model
from runtime.demo import write_checkpoint
from runtime.server.checkpoint import load_text
from runtime.server.config import ServeConfig, load_config, make_config
from runtime.server.loading import page_counts

DOCS = Path(__file__).parents[2] / "docs"
SERVING = (DOCS / "serving.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_checkpoint(folder)
    return folder


def test_the_documented_file_is_one(tmp_path):
    (block,) = re.findall(r"```toml\n(.*?)```", SERVING, re.DOTALL)
    (tmp_path / "serve.toml").write_text(block)
    config = load_config(tmp_path / "serve.toml", {"port": 9, "max_num_seqs": None})
    assert (config.port, config.max_num_seqs, config.limits.requests_per_key) == (9, 8, 16)
    assert (config.model, config.api_key_file) == (str(tmp_path / "North-Mini-Code-1.0"), str(tmp_path / "keys.txt"))


@pytest.mark.anyio
async def test_the_documented_requests_are_taken():
    bodies = re.findall(r"^curl localhost:8000(\S+) -d '(.*?)'$", SERVING, re.DOTALL | re.MULTILINE)
    assert len(bodies) == 2
    async with serving(answered('{"eyes": 3}')) as served:
        for path, body in bodies:
            assert (await served.client.post(path, content=body)).status_code == 200, body


def test_the_documented_opencode_file_is_json():
    (block,) = re.findall(r"```json\n(.*?)```", (DOCS / "opencode.md").read_text(encoding="utf-8"), re.DOTALL)
    provider = json.loads(block)["provider"]["counterpoint"]
    assert provider["models"]["north-mini-code"]["interleaved"]["field"] in ServeConfig().reasoning_fields


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"hots": "x"}, "did you mean `host`"),
        ({"port": 70_000}, "less than or equal to 65535"),
        ({"limits": {"stops": -1}}, "`limits.stops`"),
        ({"waits": {"drain_s": "long"}}, "`waits.drain_s`"),
        ({"served_model_name": ["a", ""]}, "`served_model_name.1`"),
        ({"allowed_origins": ["https://app.example/"]}, "`allowed_origins.0`"),
        ({"allowed_origins": ["app.example"]}, "`allowed_origins.0`"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(data, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config(data, {})


def test_equal_demo_checkpoints_come_out_of_every_call(demo, tmp_path):
    write_checkpoint(tmp_path)
    for path in sorted(demo.iterdir()):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_defaults_and_end_tokens_come_from_the_generation_config(demo):
    text = load_text(demo, ServeConfig())
    assert (text.defaults, text.dialect.name, text.max_model_len) == (
        {"temperature": 1.0, "top_p": 0.95},
        "north",
        8192,
    )
    assert text.end_ids == {text.tokenizer.vocabulary.ids["<|END_OF_TURN_TOKEN|>"]}


def test_a_checkpoint_without_a_template_does_not_start(demo, tmp_path):
    for path in demo.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match=r"has no chat template; needed: chat_template\.jinja"):
        load_text(tmp_path, ServeConfig())
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        load_text(tmp_path, ServeConfig())


@pytest.mark.parametrize("origin", ["*", "null", "http://localhost:3000", "https://app.example", "tauri://localhost"])
def test_origins_that_a_browser_sends_are_taken(origin):
    assert make_config({"allowed_origins": [origin]}, {}).allowed_origins == (origin,)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"null", b"[]", b"3", b"{", b"\xff", b'{"added_tokens_decoder": 1}'])
def test_whatever_is_wrong_with_a_tokenizer_is_said_in_a_line(name, content, demo, tmp_path):
    for path in demo.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"no tokenizer can be read \(\w+: .*needed: .*tokenizer\.json") as raised:
        load_text(tmp_path, ServeConfig())
    assert "\n" not in str(raised.value)


def test_kv_pages_go_to_windows_first_and_one_long_request_must_fit(demo):
    model = read_model(demo)
    full, window = page_counts(model, ServeConfig(max_num_seqs=4), 8192)
    assert (full, window) == (4 * 128, 3 * 4 * 3)
    page = 2 * model.num_kv_heads * 64 * model.head_dim * 4
    enough = 3 * window * page + 2 * 128 * page
    tight = ServeConfig(max_num_seqs=4, kv_cache_memory_bytes=enough)
    assert page_counts(model, tight, 8192) == (128, window)
    least = 3 * 3 * page + 2 * 128 * page  # one request alone
    assert page_counts(model, ServeConfig(max_num_seqs=4, kv_cache_memory_bytes=least), 8192) == (128, 3)
    with pytest.raises(ConfigError, match="too little for one request of 8192 tokens"):
        page_counts(model, ServeConfig(max_num_seqs=4, kv_cache_memory_bytes=least - 1), 8192)
    assert page_counts(model, ServeConfig(max_num_seqs=4, num_gpu_blocks=200), 8192) == (200, window)
    assert page_counts(model, ServeConfig(max_num_seqs=4, num_gpu_blocks=128), 8192) == (128, window)
    with pytest.raises(ConfigError, match=r"takes 128 blocks of 64: raise it, or lower `max_model_len` to 8128"):
        page_counts(model, ServeConfig(max_num_seqs=4, num_gpu_blocks=127), 8192)
