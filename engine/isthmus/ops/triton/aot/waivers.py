"""What does not pass a gate and is accepted: each one by name, up to an amount, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from isthmus.ops.triton.aot.figures import Built
from isthmus.ops.triton.aot.gates import SCALAR_SPILLS, SPILLS, Finding, findings


@dataclass(frozen=True, slots=True)
class Waiver:
    """Of findings of `gate` whose key matches `keys`, a pattern as in the shell, up to `limit` of what they count.

    triton: the version of which they are.
    """

    triton: str
    gate: str
    keys: str
    limit: int
    reason: str

    def names(self, built: Built) -> bool:
        """Whether it is about this kernel."""
        return fnmatchcase(built.key, self.keys)

    def covers(self, finding: Finding) -> bool:
        """Whether the finding is accepted."""
        return finding.gate == self.gate and self.names(finding.built) and finding.amount <= self.limit


PINNED, NEWEST = "3.7.1", "3.9.0"
LITTLE = "One value of 64 bits, that the assembler of this version keeps in memory to make room for one more program."
WAIVERS: tuple[Waiver, ...] = (
    Waiver(
        PINNED,
        SPILLS,
        "sm_120 | attention_kernel | attention prefill bf16 d64 g4",
        limit=8,
        reason="ptxas keeps to 128 registers, with which four programs fit, and reads one address again once a tile.",
    ),
    Waiver(
        PINNED,
        SPILLS,
        "sm_120 | sample_kernel | *",
        limit=16,
        reason="Four registers, in a kernel that runs once a step and reads the logits from memory many times.",
    ),
    Waiver(NEWEST, SPILLS, "sm_80 | merge_kernel | *", limit=8, reason=LITTLE),
    Waiver(NEWEST, SPILLS, "sm_8? | attention_kernel | *", limit=8, reason=LITTLE),
    Waiver(NEWEST, SPILLS, "sm_120 | attention_kernel | attention prefill *", limit=8, reason=LITTLE),
    Waiver(
        NEWEST,
        SCALAR_SPILLS,
        "gfx942 | attention_kernel | attention prefill bf16 d128 g4 window",
        limit=37,
        reason="Three loops of a window; vector registers have room for them. The pinned version has 15.",
    ),
    Waiver(
        NEWEST,
        SPILLS,
        "gfx1100 | attention_kernel | attention prefill bf16 d[89]? g4",
        limit=32,
        reason="No shape was found that this version compiles without; the pinned one does.",
    ),
    Waiver(
        NEWEST,
        SPILLS,
        "gfx1100 | attention_kernel | attention decode bf16 d256 *",
        limit=328,
        reason="No shape was found that this version compiles without; the pinned one does.",
    ),
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """faults: findings without a waiver.  waived: the others, with theirs.  idle: waivers that name something that was
    built, and that nothing needs.
    """

    faults: tuple[Finding, ...]
    waived: tuple[tuple[Finding, Waiver], ...]
    idle: tuple[Waiver, ...]


def judge(triton: str, built: Sequence[Built], waivers: Sequence[Waiver] = WAIVERS) -> Judgement:
    """All gates, over all that was built with this version."""
    waivers = [waiver for waiver in waivers if waiver.triton == triton]
    faults: list[Finding] = []
    waived: list[tuple[Finding, Waiver]] = []
    for finding in (finding for one in built for finding in findings(one)):
        waiver = next((waiver for waiver in waivers if waiver.covers(finding)), None)
        if waiver is None:
            faults.append(finding)
        else:
            waived.append((finding, waiver))
    used = [waiver for _, waiver in waived]
    idle = [waiver for waiver in waivers if waiver not in used and any(map(waiver.names, built))]
    return Judgement(tuple(faults), tuple(waived), tuple(idle))
