"""The parsers alone: whatever a model writes, however it is cut, becomes the same reasoning, content and calls."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hermes import hermes_vocabulary
from support.serving import answered, bytewise, call_text, ids, thought, tokenizer

from runtime.parsing import CallArguments, CallEnd, CallStart, Content, Detokenizer, Reasoning
from runtime.parsing.calls import CallReader
from runtime.parsing.find import Finder, Hit
from runtime.parsing.hermes import HermesParser
from runtime.parsing.north import NorthParser

OPEN, CLOSED = ids("<|START_THINKING|>"), ids("<|START_THINKING|><|END_THINKING|>")


@dataclass
class Read:
    """What events add up to; the order of a call's events is checked."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def add(self, events):
        for event in events:
            match event:
                case Reasoning(text):
                    assert text
                    self.reasoning += text
                case Content(text):
                    assert text
                    self.content += text
                case CallStart(index, name):
                    assert index == len(self.calls)
                    self.calls.append((name, ""))
                case CallArguments(index, text):
                    assert text
                    assert index == len(self.calls) - 1
                    name, arguments = self.calls[index]
                    self.calls[index] = (name, arguments + text)
                case CallEnd(index):
                    assert index == len(self.calls) - 1
                    self.ended.append(index)
        return self


def read(parser, tokens):
    found = Read()
    for token in tokens:
        found.add(parser.feed(token))
    return found.add(parser.finish())


def north(text, prompt=OPEN, *, has_tools=True, cut=ids):
    """Read a text with markers as North's, its ordinary text cut into tokens by `cut`."""
    tokens = []
    rest = text
    markers = sorted(tokenizer().vocabulary.ids, key=len, reverse=True)
    while rest:
        found = min(((rest.find(each), each) for each in markers if each in rest), default=(len(rest), ""))
        tokens += cut(rest[: found[0]]) + ([tokenizer().vocabulary.ids[found[1]]] if found[1] else [])
        rest = rest[found[0] + len(found[1]) :]
    return read(NorthParser(tokenizer().vocabulary, prompt, has_tools=has_tools), tokens)


def action(text):
    return north(thought("t") + f"<|START_ACTION|>{text}<|END_ACTION|>")


def test_b28_a_call_without_parameters_has_empty_arguments():
    assert action('[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]').calls == [("f", "{}")]
    both = call_text(("f", {}), ("g", {"p": 1}))
    assert north(thought("") + both).calls == [("f", "{}"), ("g", '{"p": 1}')]


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ("{}", "{}"),
        ("null", "{}"),
        ('""', "{}"),
        ('"{}"', "{}"),
        (r'"{\"p\": [1, \"\\u00e9\"]}"', '{"p": [1, "\\u00e9"]}'),
        ('{"p":  1 }', '{"p":  1 }'),
        ("[1, 2]", "[1, 2]"),
        ('"text"', '"text"'),
        ("12", "12"),
    ],
)
def test_b33_empty_null_and_string_parameters(parameters, arguments):
    for cut in (ids, bytewise):
        text = f'[{{"tool_call_id": "0", "tool_name": "f", "parameters": {parameters}}}]'
        assert north(f"<|END_THINKING|><|START_ACTION|>{text}<|END_ACTION|>", cut=cut).calls == [("f", arguments)]
    alone = action('[{"tool_name": "f"}]')
    assert (alone.calls, alone.ended) == ([("f", "{}")], [0])


def test_b34_an_action_block_is_calls_and_leaves_no_marker():
    found = north(thought("I look it up") + call_text(("find", {"q": "x"})))
    assert (found.reasoning, found.content, found.calls) == ("I look it up", "", [("find", '{"q": "x"}')])


def test_b35_prose_before_the_end_of_thinking_is_reasoning_even_when_thinking_was_closed():
    found = north("So I will<|END_THINKING|>" + call_text(("f", {})), CLOSED)
    assert (found.reasoning, found.content, found.calls) == ("So I will", "", [("f", "{}")])


def test_b35_long_prose_is_an_answer_and_streams_before_any_marker_comes():
    prose = "This goes on.\n\n" * 40
    parser = NorthParser(tokenizer().vocabulary, CLOSED, has_tools=True)
    waiting = 0
    for token in ids(prose):
        waiting = 0 if parser.feed(token) else waiting + 1
        assert waiting <= 256
    assert north(prose, CLOSED).content == prose
    found = north(prose + "<|END_THINKING|>" + call_text(("f", {})), CLOSED)
    assert (found.reasoning, found.content, found.calls) == ("", prose, [("f", "{}")])


@pytest.mark.parametrize("rest", ["", "<|START_TEXT|> and more<|END_TEXT|>", call_text(("f", {}))])
def test_b35_prose_without_any_end_of_thinking_is_content(rest):
    found = north("Just text" + rest, CLOSED)
    assert (found.reasoning, found.content.startswith("Just text")) == ("", True)


def test_b36_thinking_that_the_prompt_opened_ends_at_its_end_marker():
    for cut in (ids, bytewise):
        found = north(thought("first") + answered("second"), cut=cut)
        assert (found.reasoning, found.content) == ("first", "second")
    unclosed = north("only thoughts")
    assert (unclosed.reasoning, unclosed.content) == ("only thoughts", "")


def test_text_and_action_in_one_turn_both_count():
    found = north(thought("t") + answered("I look") + "\n" + call_text(("f", {"x": 1})))
    assert (found.content, found.calls) == ("I look", [("f", '{"x": 1}')])


def test_blocks_that_were_not_closed_end_where_the_next_begins():
    found = north("think<|START_TEXT|>text<|START_ACTION|>" + '[{"tool_name": "f"}]')
    assert (found.reasoning, found.content, found.calls) == ("think", "text", [("f", "{}")])


def test_two_action_blocks_count_their_calls_on():
    found = north(thought("") + call_text(("f", {})) + call_text(("g", {})))
    assert found.calls == [("f", "{}"), ("g", "{}")]


def test_text_that_looks_like_a_marker_is_text():
    spelled = "say <|START_ACTION|> and <|END_TEXT|>"
    tokens = [*ids("<|END_THINKING|><|START_TEXT|>"), *tokenizer().encode_plain(spelled), *ids("<|END_TEXT|>")]
    assert read(NorthParser(tokenizer().vocabulary, OPEN, has_tools=True), tokens).content == spelled


def test_without_tools_an_action_block_is_content():
    found = north(thought("") + call_text(("f", {})), has_tools=False)
    assert (found.calls, json.loads(found.content)[0]["tool_name"]) == ([], "f")


def test_b38_raw_line_breaks_and_unknown_escapes_in_strings_are_escaped():
    found = action('[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "x\ny\tz", "b": "\\d\\u12"}}]')
    ((name, arguments),) = found.calls
    assert (name, json.loads(arguments)) == ("f", {"a": "x\ny\tz", "b": "\\d\\u12"})


def test_b38_an_invalid_literal_stays_invalid_and_later_calls_keep_theirs():
    found = action('[{"tool_name": "f", "parameters": {"a": tru}}, {"tool_name": "g", "parameters": {"b": 1}}]')
    assert found.calls == [("f", '{"a": tru}'), ("g", '{"b": 1}')]
    with pytest.raises(json.JSONDecodeError):
        json.loads(found.calls[0][1])


@pytest.mark.parametrize(
    "text",
    [
        '[{"tool_name": "f", "parameters": {"p": 1}}]',
        '[{"parameters": {"p": 1}, "tool_name": "f", "tool_call_id": "0"}]',
        '[{"tool_call_id": 0, "parameters": {"p": 1}, "x": [{}, "}"], "tool_name": "f"}]',
        '{"tool_name": "f", "parameters": {"p": 1}}',
        '[{"name": "f", "arguments": {"p": 1}}]',
        '[{"tool_name": "f", "parameters": {"p": 1}, "parameters": {"p": 2}},]',
    ],
)
def test_b39_ids_may_be_missing_and_keys_come_in_any_order(text):
    assert action(text).calls == [("f", '{"p": 1}')]


def test_a_call_without_a_name_and_text_that_is_no_call_are_content():
    assert action('[{"parameters": {"p": 1}}]').content == '{"parameters": {"p": 1}}'
    assert action("I cannot do that").content == "I cannot do that"
    assert action('[{"tool_name": null, "parameters": {}}]').calls == []


def test_a_call_cut_by_the_end_stays_as_far_as_it_came():
    found = north('<|END_THINKING|><|START_ACTION|>[{"tool_name": "f", "parameters": {"a": "lon')
    assert (found.calls, found.ended, found.content) == ([("f", '{"a": "lon')], [], "")
    assert north('<|END_THINKING|><|START_ACTION|>[{"tool_na').content == ""
    for cut in ('[{"tool_name": "f"', '[{"tool_name": "f", "para', '[{"tool_name": "f", "parameters": '):
        found = north("<|END_THINKING|><|START_ACTION|>" + cut)
        assert (found.calls, found.ended) == ([("f", "")], [])


@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00", "\\ud83d\\ud83d", "a\\udc00\\ud800b", "\\ud83dx\\ude00"])
def test_half_a_surrogate_pair_becomes_text_that_can_be_sent(half):
    for block in (
        f'[{{"tool_name": "{half}", "parameters": {{"{half}": "{half}"}}}}]',
        f'[{{"tool_name": "f", "parameters": "{{\\"x\\": \\"{half}\\"}}"}}]',
        f'[{{"tool_name": "f", "parameters": "{half}"}}]',
        f'[{{"parameters": "{half}", "{half}": 1}}]',
    ):
        found = action(block)
        for text in (found.reasoning, found.content, *(text for call in found.calls for text in call)):
            text.encode()
    assert action('[{"tool_name": "\\ud83d\\ude00"}]').calls == [("\U0001f600", "{}")]


def test_arguments_stream_as_they_are_written():
    parser = NorthParser(tokenizer().vocabulary, OPEN, has_tools=True)
    for token in ids("<|END_THINKING|><|START_ACTION|>"):
        parser.feed(token)
    started = [bool(parser.feed(token)) for token in bytewise('[{"tool_name": "f", "parameters": {"text": "abcdef"}}]')]
    assert sum(started) >= len('{"text": "abcdef"}') - 1


def test_reasoning_tokens_are_counted_without_markers():
    parser = NorthParser(tokenizer().vocabulary, OPEN, has_tools=False)
    read(parser, ids("one two<|END_THINKING|><|START_TEXT|>three<|END_TEXT|>"))
    assert parser.reasoning_tokens == len(ids("one two"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=8).map(lambda name: name.replace("</", "x")),
        st.dictionaries(st.text(max_size=5), json_values, max_size=3),
    ),
    max_size=3,
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def cut_into_tokens(draw):
    """A way to cut ordinary text: whole words, single bytes, or at random places."""
    kind = draw(st.sampled_from(["words", "bytes", "random"]))
    if kind == "words":
        return tokenizer().encode_plain
    if kind == "bytes":
        return bytewise
    seed = draw(st.randoms(use_true_random=False))

    def cut(text):
        place = seed.randint(0, len(text))
        return tokenizer().encode_plain(text[:place]) + bytewise(text[place:])

    return cut


@given(texts, texts, calls, cut_into_tokens(), st.booleans(), st.booleans())
def test_b29_north_reads_the_same_however_it_is_cut(thinking, text, made, cut, ascii_only, spaced):
    """Truth is what was written: parameters dumped as JSON come back byte for byte."""
    dumped = [
        json.dumps(parameters, ensure_ascii=ascii_only, indent=2 if spaced else None, default=str)
        for _, parameters in made
    ]
    objects = ", ".join(
        f'{{"tool_call_id": "{place}", "tool_name": {json.dumps(name)}, "parameters": {arguments}}}'
        for place, ((name, _), arguments) in enumerate(zip(made, dumped, strict=True))
    )
    vocabulary = tokenizer().vocabulary
    tokens = [
        *cut(thinking),
        *ids("<|END_THINKING|><|START_TEXT|>"),
        *cut(text),
        *ids("<|END_TEXT|><|START_ACTION|>"),
        *cut(f"[{objects}]"),
        *ids("<|END_ACTION|>"),
    ]
    found = read(NorthParser(vocabulary, OPEN, has_tools=True), tokens)
    assert (found.reasoning, found.content) == (thinking, text)
    assert found.calls == [(name, arguments) for (name, _), arguments in zip(made, dumped, strict=True)]


@given(st.text('[]{}",:\\ntrue0 fu1"', max_size=60), st.integers(0, 60))
def test_b29_any_action_text_reads_the_same_whole_and_in_two_pieces(text, place):
    def read_pieces(*pieces):
        reader, found = CallReader(), Read()
        for piece in pieces:
            found.add(reader.push(piece))
        return found.add(reader.finish())

    whole = read_pieces(text)
    assert read_pieces(text[:place], text[place:]) == whole
    assert read_pieces(*text) == whole


@given(st.binary(max_size=40))
def test_the_detokenizer_gives_what_decoding_everything_gives(data):
    table = {piece: token for token, piece in enumerate(tokenizer().vocabulary.pieces) if len(piece) == 1}
    detokenizer = Detokenizer(tokenizer().vocabulary)
    text = "".join(detokenizer.push(table[bytes([byte])]) for byte in data) + detokenizer.flush()
    assert text == data.decode("utf-8", "replace")


@given(texts)
def test_plain_encoding_goes_back_to_the_text(text):
    assert tokenizer().decode(tokenizer().encode_plain(text)) == text


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.text("abc", max_size=30),
    st.integers(1, 4),
)
def test_the_finder_finds_the_string_that_ends_first_whatever_the_pieces(needles, text, size):
    ends = [(text.find(each) + len(each), -len(each), each) for each in needles if each in text]
    finder, handed_out, hit = Finder(needles), "", None
    for begin in range(0, len(text), size):
        found = finder.push(text[begin : begin + size])
        if isinstance(found, Hit):
            handed_out += found.before
            hit = found.needle
            break
        handed_out += found
        held = text[: begin + size].removeprefix(handed_out)
        assert any(each.startswith(held) for each in needles), "held back more than the beginning of a string"
    if not ends:
        assert (handed_out + finder.flush(), hit) == (text, None)
    else:
        end, _, needle = min(ends)
        assert (handed_out, hit) == (text[: end - len(needle)], needle)


def hermes(text, prompt="", *, cut=ids, has_tools=True, with_tokens=True):
    vocabulary, encode = hermes_vocabulary(with_tokens=with_tokens)
    tokens = encode(text, cut)
    return read(HermesParser(vocabulary, encode(prompt, cut), has_tools=has_tools), tokens)


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("cut", [ids, bytewise])
def test_hermes_reads_thinking_text_and_calls(cut, with_tokens):
    calls = ['{"name": "f", "arguments": {"x": "a\\nb"}}', '{"name": "g"}']
    made = "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in calls)
    found = hermes(f"<think>\nhm\n</think>\n\nLet me see.\n{made}", cut=cut, with_tokens=with_tokens)
    assert (found.reasoning, found.content) == ("hm", "Let me see.")
    assert found.calls == [("f", '{"x": "a\\nb"}'), ("g", "{}")]


def test_hermes_goes_on_where_the_prompt_left_off():
    opened = hermes("more\n</think>\n\nanswer\n", "<|im_start|>assistant\n<think>\n")
    assert (opened.reasoning, opened.content) == ("more", "answer\n")
    closed = hermes("answer", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert (closed.reasoning, closed.content) == ("", "answer")


def test_hermes_keeps_what_only_begins_like_a_tag():
    found = hermes("a <thin b <tool_cal c", with_tokens=False, cut=bytewise)
    assert found.content == "a <thin b <tool_cal c"


@given(texts.filter(lambda text: "\n" not in text), texts.map(str.strip), calls, cut_into_tokens(), st.booleans())
def test_b29_hermes_reads_the_same_however_it_is_cut(thinking, text, made, cut, with_tokens):
    # an end tag in a string would end the call, as it would for the model
    dumped = [json.dumps(parameters).replace("</", "<\\/") for _, parameters in made]
    blocks = "".join(
        f'\n<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
        for (name, _), arguments in zip(made, dumped, strict=True)
    )
    for tag in ("<", "\n"):
        thinking, text = thinking.replace(tag, ""), text.replace(tag, "")
    found = hermes(f"<think>\n{thinking}\n</think>\n\n{text}{blocks}", cut=cut, with_tokens=with_tokens)
    assert (found.reasoning, found.content) == (thinking, text)
    assert found.calls == [(name, arguments) for (name, _), arguments in zip(made, dumped, strict=True)]
