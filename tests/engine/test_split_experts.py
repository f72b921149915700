"""Experts in parts: the numbers of the whole layer, in a window of a part, and none fetched that no token needs."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import stronghold
from stronghold.engine.split_experts import SplitExperts, _gathered_again
from stronghold.errors import BudgetError, OffloadedModelError
from tests.crossed import crossed
from tests.experts import EXPERTS, FAMILIES, batches, model, train, trained

DTYPES = [torch.float32, torch.bfloat16]
PLACES: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 2, "activations": "keep"},
    {"window": 3, "store": "disk"},
    {"window": 2, "activations": "host"},
    {"window": 1, "resident": 4},
]


def offloaded(of: nn.Module, place: dict[str, Any], tmp_path: Any) -> nn.Module:
    place = {**place, "store": tmp_path / "store"} if place.get("store") == "disk" else place
    return stronghold.offload(of, device="cpu", **place)


def gradients(of: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by the names that the whole model has."""
    found = {name: p.grad for name, p in of.named_parameters() if p.grad is not None}
    for prefix, module in of.named_modules():
        if isinstance(module, SplitExperts):
            for name, pieces in module.pieces().items():
                if f"{prefix}.{pieces[0]}" in found:
                    found[f"{prefix}.{name}"] = torch.cat([found.pop(f"{prefix}.{piece}") for piece in pieces])
    return found


@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_under_autocast_parts_compute_what_the_whole_computes(family, how):
    """Routers' weights are in bf16 there, and rows in fp32."""
    whole = model(family, torch.float32, how=how)
    (batch,) = batches(1)
    parts = stronghold.split_experts(copy.deepcopy(whole), 2)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = (of(input_ids=batch, labels=batch).loss for of in (whole, parts))
    assert expected.item() == got.item()


@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_compute_what_the_whole_computes(family, dtype, how):
    whole = model(family, dtype, how=how)
    parts = stronghold.split_experts(copy.deepcopy(whole), 3)
    (batch,) = batches(1)
    losses = [of(input_ids=batch, labels=batch).loss for of in (whole, parts)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    expected, got = gradients(whole), gradients(parts)
    assert expected.keys() == got.keys()
    for name, gradient in expected.items():
        if how == "eager":
            assert torch.equal(gradient, got[name]), name
        else:  # their sums over a batch depend on how many rows there are in a call
            scale = 1e-6 if dtype == torch.float32 else 2e-2
            assert (gradient - got[name]).abs().max() <= scale * gradient.abs().max(), name


@pytest.mark.parametrize(
    ("kind", "frozen"),
    crossed([*((family, torch.float32) for family in FAMILIES), ("qwen3", torch.bfloat16)], [False, True], together=1),
    ids=str,
)
def test_every_window_and_store_has_the_same_losses(kind, frozen, tmp_path):
    family, dtype = kind
    first, steps = model(family, dtype, frozen=frozen), batches(4)
    found = []
    for place in PLACES:
        of = offloaded(stronghold.split_experts(copy.deepcopy(first), 3), place, tmp_path)
        found.append(train(of, stronghold.AdamW(trained(of), lr=1e-3), steps))
        stronghold.close(of)
    assert all(losses == found[0] for losses in found)
    if dtype == torch.float32:
        expected = train(first, torch.optim.AdamW(trained(first), lr=1e-3), steps)
        assert found[0] == pytest.approx(expected, rel=1e-6)


def test_what_no_token_needs_is_not_fetched_and_the_losses_are_the_same():
    first, steps = model(frozen=True), batches(4, samples=1, tokens=2)
    expected = train(copy.deepcopy(first), torch.optim.AdamW(trained(first), lr=1e-3), steps)
    of = stronghold.offload(stronghold.split_experts(first, 1), device="cpu", window=1)
    assert train(of, stronghold.AdamW(trained(of), lr=1e-3), steps) == pytest.approx(expected, rel=1e-6)
    report = stronghold.report(of)
    # two tokens need at most four of a layer's eight experts; one of the others may have been on its way
    assert report.step.spared_fetches >= 2 * (EXPERTS - 4 - 1)
    assert report.step.fetches + report.step.spared_fetches <= 2 * 2 * (EXPERTS + 1)
    assert "experts not needed" in str(report)


def test_trained_experts_that_no_token_came_to_are_updated_as_in_the_whole():
    first, steps = model(), batches(3, samples=1, tokens=3)
    of = stronghold.offload(stronghold.split_experts(copy.deepcopy(first), 1), device="cpu", window=2)
    train(of, stronghold.AdamW(of.parameters(), lr=1e-2, weight_decay=0.3, eps=1e-3), steps)
    train(first, torch.optim.AdamW(first.parameters(), lr=1e-2, weight_decay=0.3, eps=1e-3), steps)
    got = of.state_dict()
    for name, value in first.state_dict().items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


def test_the_rows_that_a_part_gets_are_not_kept():
    source = torch.randn(6, 4, requires_grad=True)
    token = torch.tensor([5, 0, 0, 3])
    rows = source[token]
    memory = StorageWeakRef(rows.untyped_storage())
    with _gathered_again(rows, source, token):
        output = rows.square().sum()
    del rows
    assert memory.expired()
    output.backward()
    expected = torch.zeros(6, 4).index_add(0, token, 2 * source.detach()[token])
    assert torch.equal(source.grad, expected)


def test_rows_that_are_saved_the_other_way_round_stay_so():
    """As many rows as numbers in each: their shape does not tell."""
    source, token = torch.randn(6, 3, requires_grad=True), torch.tensor([5, 0, 2])
    rows, weights = source[token], torch.randn(3, 3)
    with _gathered_again(rows, source, token):
        output = (rows.t().square() * weights).sum()
    output.backward()
    expected = torch.zeros(6, 3).index_add(0, token, 2 * source.detach()[token] * weights.t())
    assert torch.equal(source.grad, expected)


def test_tokens_that_were_written_in_between_are_refused():
    source, token = torch.randn(6, 4, requires_grad=True).clone(), torch.tensor([5, 0])
    rows = source[token]
    with _gathered_again(rows, source, token):
        output = rows.square().sum()
    source.mul_(2)
    with pytest.raises(RuntimeError, match="in-place"):
        output.backward()


def test_a_window_holds_a_part_where_the_layer_does_not_fit():
    whole = stronghold.report(stronghold.offload(model(frozen=True), device="cpu", window=1)).slots_device_bytes
    budget = whole // 2 + 8192  # beside the root
    for window in (1, "auto"):
        with pytest.raises(BudgetError, match="experts_per_part='auto'"):
            stronghold.offload(model(frozen=True), device="cpu", window=window, device_memory=budget)
    of = stronghold.offload(
        stronghold.split_experts(model(frozen=True), 1), device="cpu", window=2, device_memory=budget
    )
    assert stronghold.report(of).slots_device_bytes <= budget


def test_adapters_before_and_after(tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    first, steps = model(frozen=True).requires_grad_(False), batches(3)

    def adapted(of: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        return peft.get_peft_model(of, config)

    plain = adapted(copy.deepcopy(first))
    expected = train(plain, torch.optim.AdamW(trained(plain), lr=1e-2), steps)
    before = stronghold.offload(stronghold.split_experts(adapted(copy.deepcopy(first)), 3), device="cpu", window=1)
    after = adapted(stronghold.offload(stronghold.split_experts(first, 3), device="cpu", window=1))
    got = [train(of, stronghold.AdamW(trained(of), lr=1e-2), steps) for of in (before, after)]
    assert got[0] == got[1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("place", "dtype"), crossed([*PLACES[:2], {"window": 1, "store": "disk"}], DTYPES, together=1), ids=str
)
def test_adapters_on_the_experts_themselves_of_whole_layers(place, dtype, tmp_path):
    """PEFT's "all-linear" has them, by a parametrization that is there while the experts compute."""
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    first, steps = model(dtype=dtype).requires_grad_(False), batches(3)

    def adapted(of: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        return peft.get_peft_model(of, config)

    plain = adapted(copy.deepcopy(first))
    assert sum("experts" in name for name, p in plain.named_parameters() if p.requires_grad) == 2 * 2 * 2
    expected = train(plain, torch.optim.AdamW(trained(plain), lr=1e-2), steps)
    of = offloaded(adapted(copy.deepcopy(first)), place, tmp_path)
    assert train(of, torch.optim.AdamW(trained(of), lr=1e-2), steps) == expected
    of = adapted(offloaded(copy.deepcopy(first), {"window": 2}, tmp_path))
    assert train(of, torch.optim.AdamW(trained(of), lr=1e-2), steps) == expected


def test_adapters_on_the_experts_of_parts_are_refused():
    config = peft.LoraConfig(r=2, target_modules="all-linear")
    with pytest.raises(OffloadedModelError, match="a ParamWrapper around the Qwen3MoeExperts"):
        stronghold.offload(peft.get_peft_model(stronghold.split_experts(model(), 4), config), device="cpu", window=1)
    of = peft.get_peft_model(stronghold.offload(stronghold.split_experts(model(), 4), device="cpu", window=1), config)
    with pytest.raises(OffloadedModelError, match="target_modules"):
        of(input_ids=batches(1)[0])


def test_attention_is_compiled_beside_parts_that_run_eagerly_and_inputs_may_go_to_disk(tmp_path):
    first, steps = model(), batches(3)
    of = stronghold.offload(stronghold.split_experts(copy.deepcopy(first), 3), device="cpu", window=2)
    expected = train(of, stronghold.AdamW(of.parameters(), lr=1e-3), steps)
    split = stronghold.split_experts(copy.deepcopy(first), 3)
    with pytest.warns(UserWarning, match="ExpertsPart is not compiled .*another number of rows"):
        of = stronghold.offload(split, device="cpu", window=2, compile="aot_eager")
        losses = train(of, stronghold.AdamW(of.parameters(), lr=1e-3), steps)
    report = stronghold.report(of)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert (report.compiled, report.not_compiled) == (2, 6)
    split = stronghold.split_experts(first, 3)
    of = stronghold.offload(split, device="cpu", window=2, store=tmp_path, activations="disk")
    assert train(of, stronghold.AdamW(of.parameters(), lr=1e-3), steps) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_files_have_the_names_and_values_of_the_whole(family, tmp_path):
    whole = model(family)
    whole.save_pretrained(tmp_path / "a")
    of = stronghold.load(
        tmp_path / "a", experts_per_part=3, device="cpu", window=1, store=tmp_path / "store", activations="recompute"
    )
    assert any(isinstance(module, SplitExperts) for module in of.modules())
    stronghold.save(of, tmp_path / "b")
    of.save_pretrained(tmp_path / "c")
    for folder in ("b", "c"):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        for name, value in whole.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), (folder, name)
    state = of.state_dict()
    assert [*state] == [*whole.state_dict()]
    of.load_state_dict({name: value + 1 for name, value in state.items()})
    assert all(torch.equal(value, whole.state_dict()[name] + 1) for name, value in of.state_dict().items())


@pytest.mark.parametrize("place", ["in memory", "offloaded"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "value",
    [torch.zeros(10, 32, 32), torch.zeros(6, 32, 32), torch.zeros(8, 32, 31), torch.zeros(()), 3, None, "missing"],
    ids=["more experts", "fewer experts", "larger", "a number", "no tensor", "None", "missing"],
)
def test_what_load_state_dict_cannot_take_is_told_as_of_the_whole(value, strict, place):
    """All of it at once, with what is wrong elsewhere."""
    whole = model()
    parts = stronghold.split_experts(copy.deepcopy(whole), 3)
    if place == "offloaded":
        parts = stronghold.offload(parts, device="cpu", window=1)
    state = {**whole.state_dict(), "lm_head.weight": torch.zeros(2, 2), "another": torch.zeros(1)}
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert state.pop(name).shape == (8, 32, 32)
    if value != "missing":
        state[name] = value
    told = []
    for of in (whole, parts):
        with pytest.raises(RuntimeError) as error:
            of.load_state_dict(state, strict=strict)
        told.append(str(error.value))
    assert told[0] == told[1]


def test_what_is_missing_is_told_by_the_names_of_the_whole():
    whole = model()
    parts = stronghold.split_experts(copy.deepcopy(whole), 3)
    state = {
        name: value + 1 for name, value in whole.state_dict().items() if not name.endswith("1.mlp.experts.down_proj")
    }
    state["another"] = torch.zeros(1)
    assert whole.load_state_dict(state, strict=False) == parts.load_state_dict(state, strict=False)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in parts.state_dict().items())


def test_a_checkpoint_resumes_to_the_bit(tmp_path):
    steps = batches(4)

    def run(of: nn.Module, some: list[torch.Tensor], folder: str, *, load: bool) -> list[float]:
        of = stronghold.offload(stronghold.split_experts(of, 3), device="cpu", window=2)
        optimizer = stronghold.AdamW(of.parameters(), lr=1e-3)
        if load:
            stronghold.checkpoint.load(tmp_path / folder, of, optimizer)
        losses = train(of, optimizer, some)
        if not load:
            stronghold.checkpoint.save(tmp_path / folder, of, optimizer)
        return losses

    whole = run(model(), steps, "whole", load=False)
    halves = run(model(), steps[:2], "half", load=False) + run(model(), steps[2:], "half", load=True)
    assert halves == whole


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (lambda: stronghold.split_experts(nn.Linear(2, 2), 1), "stacked experts.*none in Linear"),
        (lambda: stronghold.split_experts(model(), 0), "between 1 and .*got 0, a layer has 8"),
        (lambda: stronghold.split_experts(model(), 9), "got 9"),
        (lambda: stronghold.split_experts(stronghold.split_experts(model(), 4), 2), "split already"),
        (
            lambda: stronghold.offload(stronghold.split_experts(model(), 4), device="cpu", window=1, micro_batch=1),
            "micro_batch .*rows are tokens",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(problem, message):
    with pytest.raises(ValueError, match=message):
        problem()


def test_an_offloaded_model_is_refused():
    of = stronghold.offload(model(), device="cpu", window=1)
    with pytest.raises(OffloadedModelError, match="before"):
        stronghold.split_experts(of, 2)
