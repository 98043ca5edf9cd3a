"""Keys, browsers, request ids, logs: who may come in and what is written down about it."""

import json
import logging
import os

import pytest
from support.serving import USER, answered, error_of, serving

from megakernel.config import ConfigError
from runtime.server.auth import KeyRing
from runtime.server.config import Limits, ServeConfig
from runtime.server.logs import JsonFormatter

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
KEY, ADMIN = "sk-first-key", "sk-admin-key"


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def every_route(served):
    document = (await served.client.get("/openapi.json", headers=bearer(KEY))).json()
    routes = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    assert len(routes) == 15
    return [*routes, ("GET", "/openapi.json")]


async def test_b44_b48_only_liveness_and_readiness_answer_without_a_key():
    async with serving(answered("ok"), keys=[KEY], admin_keys=[ADMIN]) as served:
        for method, path in await every_route(served):
            for headers in ({}, bearer("wrong"), {"Authorization": KEY}, {"authorization": f"Basic {KEY}"}):
                response = await served.client.request(method, path.replace("{name}", "demo"), headers=headers)
                if path in ("/health", "/ready"):
                    assert response.status_code == 200
                    continue
                assert response.status_code == 401, path
                assert error_of(response)["type"] == "authentication_error"
                assert response.headers["www-authenticate"] == "Bearer"
        for path in (
            "//v1/models",
            "/v1//models",
            "/V1/MODELS",
            "/v1/models/",
            "/ready/../v1/models",
            "/nothing",
        ):
            assert (await served.client.get(path)).status_code == 401, path
        for headers in (bearer(KEY), {"AUTHORIZATION": f"bearer {KEY}"}, bearer(ADMIN)):
            assert (await served.client.get("/v1/models", headers=headers)).status_code == 200


async def test_admin_routes_need_an_admin_key():
    async with serving(answered("ok"), keys=[KEY], admin_keys=[ADMIN]) as served:
        for key, status in ((KEY, 401), (ADMIN, 200)):
            assert (await served.client.post("/reset_prefix_cache", headers=bearer(key))).status_code == status
        body = {"request_id": "x"}
        assert (await served.client.post("/abort", json=body, headers=bearer(KEY))).status_code == 401
        assert (await served.client.post("/abort", json=body, headers=bearer(ADMIN))).status_code == 404
    async with serving(answered("ok"), keys=[KEY]) as served:
        assert (await served.client.post("/reset_prefix_cache", headers=bearer(KEY))).status_code == 401


async def test_without_keys_a_dummy_key_is_fine():
    async with serving(answered("ok")) as served:
        assert (await served.client.get("/v1/models", headers=bearer("dummy"))).status_code == 200
        assert (await served.client.post("/reset_prefix_cache")).status_code == 200


async def test_metrics_are_open_only_by_switch():
    for is_open in (False, True):
        async with serving(answered("ok"), keys=[KEY], config=ServeConfig(open_metrics=is_open)) as served:
            assert (await served.client.get("/metrics")).status_code == (200 if is_open else 401)


def test_keys_in_a_file_are_read_again_when_it_changes(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_text("# our keys\none\n\n two \n")
    ring = KeyRing(["fixed"], str(path))
    now = [0.0]
    monkeypatch.setattr("runtime.server.auth.time.monotonic", lambda: now[0])

    def valid():
        now[0] += 10
        return {key for key in ("fixed", "one", "two", "three", "", "# our keys") if ring.name_of(key)}

    assert valid() == {"fixed", "one", "two"}
    path.write_text("three\n")
    os.utime(path, ns=(1, 1))
    assert valid() == {"fixed", "three"}
    path.unlink()
    assert valid() == {"fixed", "three"}, "a file that is gone locks nobody out and lets nobody in"
    path.write_text("")
    assert valid() == {"fixed"}
    assert not ring.is_empty
    for content in ("", "# nothing\n"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="no key"):
            KeyRing([], str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing([], str(tmp_path / "absent"))


def test_a_key_file_as_editors_leave_it(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\t# not a key\r\n  two\t\r\n   \r\n")
    ring = KeyRing([], str(path))
    assert [bool(ring.name_of(key)) for key in ("one", "two", "# not a key", "\t# not a key", "")] == [
        True, True, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("key", ["", "schl\u00fcssel", "two words", "tab\there", "\x7f"])
def test_a_key_that_nobody_could_send_is_refused_and_not_repeated(key, tmp_path):
    for make in (lambda: KeyRing(["good", key], None), lambda: KeyRing([], str(tmp_path / "keys"))):
        (tmp_path / "keys").write_text(f"good\n{key}\n" if key else "", encoding="utf-8")
        with pytest.raises(ConfigError) as error:
            make()
        assert not key or key not in str(error.value)


def test_a_file_that_turns_wrong_keeps_the_keys_read_before(tmp_path, monkeypatch, caplog):
    path = tmp_path / "keys"
    path.write_text("one\n")
    ring = KeyRing([], str(path))
    path.write_text("two\nschl\u00fcssel\n", encoding="utf-8")
    monkeypatch.setattr("runtime.server.auth.time.monotonic", lambda: 1e9)
    assert [bool(ring.name_of(key)) for key in ("one", "two")] == [True, False]
    assert "line 2" in caplog.text
    assert "schl" not in caplog.text


@pytest.mark.parametrize(
    ("config", "environment"),
    [
        ({"api_key": ("",)}, {}),
        ({"api_key": ("good", "")}, {}),
        ({"api_key_file": ""}, {}),
        ({"admin_key_file": ""}, {}),
        ({}, {"COUNTERPOINT_API_KEY": ""}),
        ({}, {"COUNTERPOINT_API_KEY": " , "}),
        ({}, {"COUNTERPOINT_ADMIN_KEY": ""}),
    ],
)
def test_an_empty_key_opens_nothing(config, environment, monkeypatch):
    from runtime.server.run import key_rings

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError):
        key_rings(ServeConfig(**config))


def test_keys_come_from_flags_and_the_environment(monkeypatch):
    from runtime.server.run import key_rings

    monkeypatch.setenv("COUNTERPOINT_API_KEY", "one, two")
    keys, admin_keys = key_rings(ServeConfig(api_key=("three",)))
    assert all(keys.name_of(key) for key in ("one", "two", "three"))
    assert admin_keys.is_empty


async def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared = []
    ring = KeyRing(["a", "b", "c"], None)
    from hmac import compare_digest

    def counting(one, other):
        compared.append(1)
        return compare_digest(one, other)

    monkeypatch.setattr("runtime.server.auth.hmac.compare_digest", counting)
    for key in ("a", "c", "wrong"):
        ring.name_of(key)
    assert len(compared) == 9


async def test_b45_preflight_is_answered_without_a_key_for_allowed_origins_only():
    config = ServeConfig(allowed_origins=("https://app.example",))
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with serving(answered("ok"), keys=[KEY], config=config) as served:
        good = await served.client.options(CHAT, headers={"Origin": "https://app.example", **asking})
        assert good.status_code == 200
        assert good.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in good.headers["access-control-allow-headers"].lower()
        assert "access-control-allow-credentials" not in good.headers
        foreign = await served.client.options(CHAT, headers={"Origin": "https://evil.example", **asking})
        assert "access-control-allow-origin" not in foreign.headers
        headers = {"Origin": "https://app.example", **bearer(KEY)}
        response = await served.client.post(CHAT, json={"messages": USER}, headers=headers)
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        refused = await served.client.post(CHAT, json={"messages": USER}, headers={"Origin": "https://app.example"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://app.example")
    async with serving(answered("ok"), keys=[KEY]) as served:
        response = await served.client.options(CHAT, headers={"Origin": "https://app.example", **asking})
        assert "access-control-allow-origin" not in response.headers


async def test_request_ids_go_in_and_out():
    async with serving(answered("ok")) as served:
        response = await served.client.post(CHAT, json={"messages": USER}, headers={"X-Request-Id": "my-id.7"})
        assert response.headers["x-request-id"] == "my-id.7"
        assert response.json()["id"] == "chatcmpl-my-id.7"
        for wrong in ("", "x" * 200, "with space", "\u00e9"):
            headers = [("X-Request-Id", wrong.encode("latin-1"))]
            given = (await served.client.get("/health", headers=headers)).headers["x-request-id"]
            assert given != wrong
            assert len(given) == 24


async def test_the_same_request_id_twice_at_once_is_two_requests():
    import asyncio

    async with serving(answered("ok " * 30), seconds=0.001) as served:
        headers = {"X-Request-Id": "same"}
        posts = [served.client.post(CHAT, json={"messages": USER}, headers=headers) for _ in range(3)]
        found = await asyncio.gather(*posts)
        assert {response.json()["choices"][0]["message"]["content"] for response in found} == {"ok " * 30}


async def test_a_key_may_have_so_many_requests_at_once():
    import asyncio

    config = ServeConfig(limits=Limits(requests_per_key=2))
    async with serving(answered("ok " * 30), keys=["a", "b"], config=config, seconds=0.003) as served:
        post = served.client.post
        running = [asyncio.ensure_future(post(CHAT, json={"messages": USER}, headers=bearer("a"))) for _ in range(2)]
        while len(served.service.live) < 2:
            await asyncio.sleep(0)
        refused = await post(CHAT, json={"messages": USER}, headers=bearer("a"))
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await post(CHAT, json={"messages": USER, "max_tokens": 1}, headers=bearer("b"))).status_code == 200
        assert [response.status_code for response in await asyncio.gather(*running)] == [200, 200]
        assert (await post(CHAT, json={"messages": USER, "max_tokens": 1}, headers=bearer("a"))).status_code == 200


async def test_logs_are_json_and_hold_neither_text_nor_keys(caplog):
    caplog.set_level(logging.DEBUG)
    async with serving(answered("an unlikely answer"), keys=[KEY]) as served:
        body = {"messages": [{"role": "user", "content": "an unlikely question"}]}
        for headers in (bearer(KEY), bearer("sk-wrong-key")):
            await served.client.post(CHAT, json=body, headers=headers)
            await served.client.post(CHAT, json={**body, "temperature": "x"}, headers=headers)
    lines = [JsonFormatter().format(record) for record in caplog.records if record.name.startswith("runtime")]
    assert any('"generated"' in line for line in lines)
    for line in lines:
        found = json.loads(line)
        assert {"time", "level", "logger", "message"} <= set(found)
        for secret in ("unlikely", KEY, "sk-wrong-key"):
            assert secret not in line
