"""Rows that are packed into one sample do not see one another, or packing is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from stronghold.engine import offload
from stronghold.lab.finetuning.packing import check_apart
from tests.lab.finetuning import runs, small

COLLATE = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
CPU = torch.device("cpu")


def placed(model: Any) -> Any:
    return offload(model.eval(), device="cpu", window=1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_logits_of_a_row_in_a_packed_sample_are_those_of_the_row_alone(kind: str, attention: str) -> None:
    model = small.model(kind, attn_implementation=attention)
    rows = [[5, 9, 7, 6, 21], [8, 30], [11, 12, 13, 40, 14, 15]]
    ids = [one for row in rows for one in row]
    batch = COLLATE([{"input_ids": ids, "labels": ids, "seq_lengths": [len(row) for row in rows]}])
    del batch["labels"]
    with torch.no_grad():
        alone = [model(torch.tensor([row])).logits[0] for row in rows]
        plain = model(torch.tensor([ids])).logits[0]
        model = placed(model)
        packed = model(**batch, use_cache=False).logits[0]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-6)
    assert (plain - packed)[len(rows[0]) :].abs().max() > 1e-3  # they would see one another
    check_apart(model, vocabulary=50, device=CPU)


def test_a_model_that_passes_positions_by_is_refused() -> None:
    config = transformers.MambaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=3, state_size=4, use_mambapy=False
    )
    torch.manual_seed(0)
    model = placed(transformers.MambaForCausalLM(config))
    with pytest.raises(
        ValueError, match=r"must not see one another \(got a MambaForCausalLM, where logits .*--packing"
    ):
        check_apart(model, vocabulary=50, device=CPU)


def test_a_model_whose_mask_is_not_made_of_positions_is_refused() -> None:
    model = small.model()
    forward = model.model.forward

    def forgetful(*given: Any, position_ids: Any = None, **more: Any) -> Any:
        return forward(*given, **more)

    model.model.forward = forgetful
    with pytest.raises(ValueError, match="must not see one another"):
        check_apart(placed(model), vocabulary=50, device=CPU)


def test_the_look_changes_neither_mode_nor_random_state() -> None:
    model = placed(small.model())
    model.train()
    before = torch.get_rng_state()
    check_apart(model, vocabulary=50, device=CPU)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_looks_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("looked")

    monkeypatch.setattr("stronghold.lab.finetuning.packing.check_apart", refuse)
    wanted = runs.settings(tmp_path)
    wanted = replace(wanted, data=replace(wanted.data, packing=True))
    with pytest.raises(ValueError, match="looked"):
        runs.run(wanted)
    assert not Path(wanted.out).exists()
