"""What loops do besides steps: unfreezing, larger embeddings, histograms, prompts in batches.

Words used here: **plain** and **wrapped** as in `runs.py`.
"""

from __future__ import annotations

import pytest
import torch
from models import at_home, differing, loss_of, tokens, transformer
from torch import nn
from trainer_cases import llama, on_disk
from training_cases import both_ends

import infinity

SEED = 182


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@both_ends
def test_gradual_unfreezing_is_the_same(home, tmp_path):
    """Method: the optimizer has every parameter; the head's block trains first, then one more block
    with each step, then the first are frozen again. Losses, weights and the optimizer's states are
    plain torch's, where a group is added for each block instead.
    """

    def thaw(model: nn.Module, step: int) -> list[nn.Parameter]:
        changed = []
        for number, block in enumerate(model.blocks):
            wanted = number >= len(model.blocks) - 1 - step and not (step == 3 and number == 2)
            changed += [param for param in block.parameters() if param.requires_grad != wanted]
            block.requires_grad_(wanted)
        return changed

    model, plain = (transformer(SEED, dropout=0.0, width=32, blocks=3) for _ in range(2))
    for one in (model, plain):
        one.requires_grad_(False)
    model, optimizer = infinity.wrap_model(model, adamw(model), at_home(home, home, tmp_path))
    grouped = None
    for step in range(4):
        added = thaw(plain, step)
        thaw(model, step)
        if grouped is None:
            grouped = torch.optim.AdamW(added, lr=1e-2, fused=True)
        elif step < 3:
            grouped.add_param_group({"params": added})
        losses = []
        for one, its in ((model, optimizer), (plain, grouped)):
            losses.append(loss_of(one, tokens(SEED + step)))
            losses[-1].backward()
            its.step()
            its.zero_grad()
        assert torch.equal(*losses)
    assert differing(model.state_dict(), plain.state_dict()) == []
    assert len(optimizer.state_dict()["state"]) == len(grouped.state_dict()["state"])


def test_embeddings_grow_before_wrapping_and_not_after(tmp_path):
    """Method: transformers' resize_token_embeddings; before, training is plain torch's, with the
    new rows; after, the error names the way, which works."""
    batch = {"input_ids": torch.tensor([[3, 70, 5, 71]]), "labels": torch.tensor([[3, 70, 5, 71]])}
    torch.manual_seed(SEED)
    plain = llama(attention_dropout=0.0)
    plain.resize_token_embeddings(72, mean_resizing=False)
    torch.manual_seed(SEED)
    model = llama(attention_dropout=0.0)
    model.resize_token_embeddings(72, mean_resizing=False)
    plain_optimizer, (model, optimizer) = (
        adamw(plain),
        infinity.wrap_model(model, adamw(model), on_disk(tmp_path)),
    )
    for one, its in ((model, optimizer), (plain, plain_optimizer)):
        one(**batch).loss.backward()
        its.step()
        its.zero_grad()
    assert differing(model.state_dict(), plain.state_dict()) == []
    with pytest.raises(infinity.UsageError, match="unwrap_model"):
        model.resize_token_embeddings(80, mean_resizing=False)
    model, _ = infinity.unwrap_model(model, optimizer)
    model.resize_token_embeddings(80, mean_resizing=False)
    model, optimizer = infinity.wrap_model(model, adamw(model), on_disk(tmp_path))
    model(**batch).loss.backward()
    optimizer.step()
    assert model.state_dict()["lm_head.weight"].shape[0] == 80


@pytest.mark.parametrize("home", ["device", "nvme"])
def test_named_weights_yields_each_weight_once(home, tmp_path):
    """Method: names and values are those of named_parameters and the state dict, tied ones once;
    histograms of them are plain torch's."""
    model, plain = (transformer(SEED, width=32, blocks=2).to(torch.bfloat16) for _ in range(2))
    model, optimizer = infinity.wrap_model(model, adamw(model), at_home(home, home, tmp_path))
    found = dict(infinity.named_weights(model))
    assert sorted(found) == sorted(name for name, _ in plain.named_parameters())
    assert (
        differing(
            found, {name: value for name, value in plain.state_dict().items() if name in found}
        )
        == []
    )
    for name, value in infinity.named_weights(model):
        assert torch.equal(
            torch.histc(value.float(), 8), torch.histc(plain.state_dict()[name].float(), 8)
        )
    with pytest.raises(infinity.UsageError, match="not wrapped"):
        next(infinity.named_weights(plain))


def test_weights_come_from_the_disk_once_a_pass_whatever_the_prompts(tmp_path):
    """Method: everything on disk with the least of windows; a batch of eight prompts generates with
    as many bytes read as one does, and each with the tokens that it gets alone in plain torch."""
    model, plain = llama().eval(), llama().eval()
    infinity.wrap_model(model, None, on_disk(tmp_path, host_memory="16MiB"))
    prompts = torch.randint(3, 67, (8, 5), generator=torch.Generator().manual_seed(SEED))
    read = []
    for batch in (prompts[:1], prompts):
        before = infinity.stats(model).edges["nvme->host"].nbytes
        found = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
        )
        read.append(infinity.stats(model).edges["nvme->host"].nbytes - before)
    assert read[0] == read[1] > 0
    for row, prompt in zip(found, prompts):
        alone = plain.generate(
            prompt[None],
            attention_mask=torch.ones(1, 5),
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
        )
        assert torch.equal(row, alone[0])
