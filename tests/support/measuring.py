"""Cards that answer as they are told: records made in memory, and a command that writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megakernel.config import digest
from megakernel.measurement import Card, Record, Sample
from megakernel.tiling import Choices
from tuner.measure import Batch
from tuner.outcome import Measured, Timed
from tuner.problem import Problem

CARD = Card(
    name="made up",
    compute_capability="9.0",
    num_sms=132,
    shared_memory_per_block_bytes=232448,
    memory_bytes=1,
    l2_bytes=1,
    driver="0",
    cuda="0",
)


def record_of(
    problem: Problem, times: Mapping[str, tuple[float, ...]], choices: Mapping[str, Choices], **more
) -> Record:
    """A record of the first bucket."""
    return Record(
        what="contest",
        date="2026-01-01",
        commit="none",
        code="none",
        card=CARD.model_copy(update={key: getattr(problem.chip, key) for key in ("num_sms", "memory_bytes")}),
        facts={},
        samples=tuple(Sample(name=name, ms=ms) for name, ms in times.items()),
        model_digest=digest(problem.model),
        bucket=problem.config.buckets[0],
        choices=dict(choices),
        **more,
    )


@dataclass
class FakeCard:
    """Answers with `first`, then with `again`; whoever is not named is timed at 9 ms."""

    first: dict[str, Measured] = field(default_factory=dict)
    again: dict[str, Measured] = field(default_factory=dict)
    took_s: float = 1.0
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    source: str = "card"

    def measure(self, stage, named, seconds):
        """Note who is measured, and answer."""
        assert seconds > 0
        self.asked.append((stage, tuple(named)))
        answers = self.first if stage == "first" else self.first | self.again
        return Batch({name: answers.get(name, Timed((9.0, 9.0, 9.0))) for name in named}, self.took_s, "made up")


COMMAND = '''
"""Stands for `runtime measure`: reads a request, writes a record, or does what a card may do instead."""
import json, os, sys, time, tomllib
from pathlib import Path
request, out = Path(sys.argv[1]), Path(sys.argv[3])
asked = tomllib.loads(request.read_text())
told = json.loads(Path(os.environ["TOLD"]).read_text())
log = Path(os.environ["TOLD"] + ".log")
log.write_text((log.read_text() if log.exists() else "") + ",".join(v["name"] for v in asked["variants"]) + "\\n")
if told.get("gone"):
    sys.exit("no card here")
samples, faults = [], {}
for variant in asked["variants"]:
    name = variant["name"]
    Path(str(out) + ".now").write_text(name)
    does = told.get(name, 5.0)
    if does == "hang":
        time.sleep(60)
    if does == "crash":
        sys.exit("illegal address")
    if isinstance(does, list):
        faults[name] = {"kind": does[0], "text": does[1]}
    else:
        samples.append({"name": name, "ms": [does] * asked["rounds"]})
Path(str(out) + ".now").unlink()
card = {"name": "made up", "compute_capability": "9.0", "num_sms": 1, "shared_memory_per_block_bytes": 1}
card |= {"memory_bytes": 1, "l2_bytes": 1, "driver": "0", "cuda": "0"}
record = {"what": "contest", "date": "d", "commit": "c", "code": "c", "card": card, "facts": {}}
out.write_text(json.dumps(record | {"samples": samples, "faults": faults}))
'''
