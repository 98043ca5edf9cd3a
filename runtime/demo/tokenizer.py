"""The demo model's tokenizer: byte-level BPE, made from a list of words, with the markers of North's turns.

Owns ids and merges, which follow from this file alone. Any text can be encoded, what no word covers as bytes.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

CONTROL = (
    "<PAD>",
    "<UNK>",
    "<CLS>",
    "<SEP>",
    "<MASK_TOKEN>",
    "<BOS_TOKEN>",
    "<EOS_TOKEN>",
    "<EOP_TOKEN>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|START_TEXT|>",
    "<|END_TEXT|>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|START_TOOL_RESULT|>",
    "<|END_TOOL_RESULT|>",
)
"""Special tokens; a token's id is its place."""

VOCABULARY = 1024
"""Ids that the model has; the last ones have no token, as in real checkpoints."""

_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then them
these so some her would make like him into time has look two more write go see number no way could people my than
first water been call who oil its now find long down day did get come made may part over new sound take only little
work know place year live me back give most very after thing our just name good sentence man think say great where
help through much before line right too mean old any same tell boy follow came want show also around form three small
set put end does another well large must big even such because turn here why ask went men read need land different
home us move try kind hand picture again change off play spell air away animal house point page letter mother answer
found study still learn should world def return self import class None True False print else elif while lambda yield
async await raise except finally assert int str list dict set tuple float bool len range open file path error value
key item index data json text token tool function parameters name type string object array number properties required
description query location weather city
"""

# Letters with their apostrophe suffixes, single digits, runs of marks, line breaks with the spaces before them, spaces.
_SPLIT = Regex(r"""'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")


def demo_tokenizer() -> Tokenizer:
    """Return the tokenizer; equal on every call."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: position for position, token in enumerate((*CONTROL, *alphabet))}
    merges: list[tuple[str, str]] = []
    for word in _WORDS.split():
        for spelling in (word, f"Ġ{word}"):
            _add_merges(spelling, vocabulary, merges)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue] - a property
        [
            pre_tokenizers.Split(_SPLIT, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] - a property
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    return tokenizer


def _add_merges(spelling: str, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Merge a word from left to right, as far as the vocabulary has room."""
    for end in range(2, len(spelling) + 1):
        token = spelling[:end]
        if token not in vocabulary and len(vocabulary) < VOCABULARY - 24:
            vocabulary[token] = len(vocabulary)
            merges.append((spelling[: end - 1], spelling[end - 1]))
