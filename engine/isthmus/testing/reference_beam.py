"""Beam search written plainly, with the whole vocabulary and nothing remembered: what a group of beams must find.

It follows transformers' `_beam_search` (version 5) for one prompt, with lists for tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from isthmus.sampling_params import BeamSearchParams

NextLogprobs = Callable[[Sequence[int]], Sequence[float]]
"""Output so far -> the log-probability of each token that may follow."""
NOBODY = -1.0e9
"""The score of a place that nobody has taken."""


def plain_beam_search(
    params: BeamSearchParams, next_logprobs: NextLogprobs, stop_ids: Collection[int], max_tokens: int
) -> list[tuple[list[int], float]]:
    """(output, score) of the sequences that are found, the best first. The vocabulary must have more tokens than there
    are candidates: width * (1 + number of stop ids).
    """
    width, penalty = params.beam_width, params.length_penalty
    beams: list[tuple[list[int], float]] = [([], 0.0), *[([], NOBODY)] * (width - 1)]
    ended: list[tuple[list[int], float, bool]] = [([], NOBODY, False)] * width
    for length in range(1, max_tokens + 1):
        found = [
            ([*output, token_id], before + logprob)
            for output, before in beams
            for token_id, logprob in enumerate(next_logprobs(output))
        ]
        found = sorted(found, key=lambda one: -one[1])[: max(2, 1 + len(stop_ids)) * width]
        ends = [output[-1] in stop_ids or length == max_tokens for output, _ in found]
        for (output, logprob), has_ended in list(zip(found, ends, strict=True))[:width]:
            if has_ended:
                ended.append((output, logprob / length**penalty, True))
        ended = sorted(ended, key=lambda one: -one[1])[:width]
        if all(ends):
            break
        beams = [one for one, has_ended in zip(found, ends, strict=True) if not has_ended][:width]
        at_best = max_tokens if params.early_stopping == "never" and penalty > 0 else length
        improvable = any(beams[0][1] / at_best**penalty > (score if taken else NOBODY) for _, score, taken in ended)
        if not improvable or (params.early_stopping is True and all(taken for *_, taken in ended)):
            break
    return [(output, score) for output, score, taken in ended if taken]
