"""What leaves an actor arrives as it was, and is not written to on the way."""

from __future__ import annotations

import pytest
import torch

from treeprop_ray.engine import transport


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_a_tensor_arrives_with_its_bits(dtype: torch.dtype) -> None:
    sent = torch.arange(6).view(2, 3).to(dtype)
    arrived = transport.from_array(transport.to_array(sent))
    assert arrived is not None and arrived.dtype == dtype and torch.equal(arrived, sent)


def test_values_with_tensors_inside_arrive_whole() -> None:
    x = torch.randn(3, dtype=torch.bfloat16)
    value = ({"a": x, "b": (torch.ones(2), None)}, 3, "text", [1, 2])
    a, *rest = transport.arriving(transport.leaving(value))
    assert torch.equal(a["a"], x) and torch.equal(a["b"][0], torch.ones(2)) and a["b"][1] is None
    assert rest == [3, "text", [1, 2]]


def test_packets_hold_what_their_readers_need_and_absent_adjoints() -> None:
    tensors = {"z4": torch.ones(2), "l2": None, "mu4": torch.zeros(1)}
    packets = transport.pack(tensors, [("z4",), ("l2", "mu4")])
    assert [sorted(packet) for packet in packets] == [["z4"], ["l2", "mu4"]]
    assert transport.unpack(packets[1:])["l2"] is None
    assert transport.size(tensors) == 12


def test_what_leaves_has_no_graph() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    assert transport.to_array(x).tolist() == [2, 2]
