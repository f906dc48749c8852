"""What does not pass a gate and is accepted: each one by name, up to an amount, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from isthmus.ops.triton.aot.figures import Built
from isthmus.ops.triton.aot.gates import Finding, findings


@dataclass(frozen=True, slots=True)
class Waiver:
    """Of findings of `gate` whose key matches `keys`, a pattern as in the shell, up to `limit` of what they count."""

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


WAIVERS: tuple[Waiver, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """faults: findings without a waiver.  waived: the others, with theirs.  idle: waivers that name something that was
    built, and that nothing needs.
    """

    faults: tuple[Finding, ...]
    waived: tuple[tuple[Finding, Waiver], ...]
    idle: tuple[Waiver, ...]


def judge(built: Sequence[Built], waivers: Sequence[Waiver] = WAIVERS) -> Judgement:
    """All gates, over all that was built."""
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
