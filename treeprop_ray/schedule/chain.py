"""The schedule of backpropagation over a chain of stages. Pure Python, no torch, no Ray."""

from __future__ import annotations

from treeprop_ray.schedule.ops import Call, Op, Row, Wave, alike, interleave, make_calls


def one_chain_step(
    stages: int, stem_trains: bool, pieces: int = 1, side_inputs: tuple[str, ...] = ()
) -> list[Call]:
    """The calls of a backpropagation step over a chain of stages, one host each (GPipe).

    Stage 0 opens the batch and hands the labels (y, and k: how many of the whole batch count) to
    the last stage; that one has the head and goes forward and backward in one call.
    """

    def first_piece() -> list[Wave]:
        last = stages - 1
        waves: list[Row] = []
        for k in range(stages):
            opening = [Op("open", 0, (), ("z0", "y", "k", *side_inputs))] if k == 0 else []
            ahead = [Op("ahead", k, (f"z{k}", *side_inputs), (f"z{k + 1}",))]
            back = [
                Op("head", k, (f"z{k + 1}", "y", "k"), (f"a{k + 1}",)),
                Op("back", k, (f"a{k + 1}",), (f"a{k}",)),
            ]
            waves.append((k, "forward", k, {k: opening + ahead + (back if k == last else [])}))
        for k in range(last - 1, -1, -1):
            ops = [Op("back", k, (f"a{k + 1}",), (f"a{k}",))]
            waves.append((2 * last - k, "backward", k, {k: ops}))
        if stem_trains:
            waves[-1][3][0].append(Op("close", 0, ("a0",)))
        return make_calls(waves, 0)

    return interleave(alike(first_piece(), pieces), stride=1)
