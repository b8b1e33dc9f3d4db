"""The kit's own yardsticks: draws that fit their laws, and draws that do not."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_spec.testing.compare import close, largest_gap, same_logits, same_reply
from mlx_spec.testing.faults import ContractFault
from mlx_spec.testing.statistics import Draws
from mlx_spec.testing.watch import first_difference, same_bytes

V, N = 23, 900


def drawn(seed: int, reported=lambda logits: logits, sharpen: float = 1.0) -> Draws:
    """N draws from softmax(sharpen * logits), reported as softmax(reported(logits))."""
    keys = mx.random.split(mx.random.key(seed))
    logits = 2 * mx.random.normal((N, V), key=keys[0])
    tokens = mx.random.categorical(sharpen * logits, key=keys[1]).tolist()
    out = Draws()
    for law, token in zip(mx.softmax(reported(logits), axis=-1), tokens, strict=True):
        out.add(law, token)
    return out


@pytest.mark.parametrize("seed", range(40), ids=lambda n: f"seed{n}")
def test_true_laws_are_believed(seed: int) -> None:
    assert drawn(seed).complaint(seed) == ""


@pytest.mark.parametrize("seed", range(5), ids=lambda n: f"seed{n}")
@pytest.mark.parametrize("sharpen", [0.6, 1.5], ids=lambda n: f"x{n}")
def test_another_temperature_is_found(seed: int, sharpen: float) -> None:
    assert "than their laws say" in drawn(seed, sharpen=sharpen).complaint(seed) or "do not fit" in drawn(
        seed, sharpen=sharpen
    ).complaint(seed)


@pytest.mark.parametrize("seed", range(5), ids=lambda n: f"seed{n}")
def test_the_law_of_another_draw_is_found(seed: int) -> None:
    assert drawn(seed, reported=lambda logits: mx.roll(logits, 1, axis=0)).complaint(seed) != ""


def test_impossible_tokens_and_missing_mass_are_found() -> None:
    draws = Draws()
    for _ in range(3):
        draws.add(mx.array([0.5, 0.5, 0.0]), 2)
    assert draws.complaint() == "3 of 3 tokens that have probability 0 in the law given for them"
    draws = Draws()
    draws.add(mx.array([0.5, 0.25, 0.0]), 1)
    assert draws.complaint() == "laws with a mass from 0.7500 to 0.7500"


def test_point_masses_are_believed() -> None:
    draws = Draws()
    for i in range(5):
        draws.add(mx.eye(5)[i], i)
    assert draws.complaint() == ""


def test_bytes_are_compared_as_bytes() -> None:
    a = mx.array([0.0, 1.0, float("nan")])
    assert same_bytes(a, mx.array([0.0, 1.0, float("nan")]))
    assert not same_bytes(a, mx.array([-0.0, 1.0, float("nan")]))
    assert not same_bytes(mx.array([1, 2]), mx.array([1.0, 2.0]))
    assert not same_bytes(mx.zeros((2, 3)), mx.zeros((3, 2)))
    assert first_difference({"k": mx.zeros((2, 3))}, {"k": mx.zeros((2, 3))}) == ""
    b = mx.zeros((2, 3))
    b[1, 2] = 1
    assert first_difference({"k": mx.zeros((2, 3))}, {"k": b}) == "tensor 'k' (1 of 6 values, first at index (1, 2))"
    assert first_difference({"k": b}, {"v": b}) == "tensor 'k' in one of them only"


def test_closeness_follows_dtype_and_size() -> None:
    a = mx.array([100.0, -mx.inf])
    assert close(mx.array([100.05, -mx.inf]), a) and not close(mx.array([100.2, -mx.inf]), a)
    assert not close(mx.array([100.0, 0.0]), a)
    assert largest_gap(mx.array([mx.nan]), mx.array([1.0])) == float("inf")
    assert close(mx.array([1.1]).astype(mx.bfloat16), mx.array([1.0]).astype(mx.bfloat16))


def test_faults_say_where_things_part() -> None:
    with pytest.raises(ContractFault, match=r"found token 5 at reply position 2 .*expected 7, as plain decoding"):
        same_reply([1, 2, 5], [1, 2, 7, 8], "reply", "here")
    with pytest.raises(ContractFault, match="found token nothing at reply position 1"):
        same_reply([1], [1, 2], "reply", "here")
    with pytest.raises(ContractFault, match="1 of 3 values different, largest difference 1"):
        same_logits(mx.array([0.0, 1, 2]), mx.array([0.0, 1, 3]), "bitwise", "logits", "here")
    same_logits(mx.array([0.0, 1, 2.0001]), mx.array([0.0, 1, 2]), "greedy", "logits", "here")
    with pytest.raises(ContractFault, match=r"found tokens 1, .*expected tokens 2"):
        same_logits(mx.array([0.0, 2.0001, 2]), mx.array([0.0, 2, 2.0001]), "greedy", "logits", "here")
