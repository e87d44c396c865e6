"""The supervised loop of the small worlds' models."""

from types import SimpleNamespace

import torch

from verl_sis.cpu.warm_start import WarmStart, fit


class Weight(torch.nn.Module):
    """One weight, 1 at first, which is its own loss."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.linear.weight)

    def forward(self, x):
        self.dtype = self.linear(x).dtype
        return SimpleNamespace(loss=self.linear(x).sum())


def losses(**options):
    model, found = Weight(), []
    settings = WarmStart(steps=2, learning_rate=0.25, warmup_steps=1)
    fit(model, lambda: {"x": torch.ones(1, 1)}, settings, lambda _, loss: found.append(loss), **options)
    assert model.linear.weight.dtype == torch.float32
    return found, model.dtype


def test_each_step_sees_the_weights_of_the_one_before():
    # AdamW: the weight decays by 0.25 * 0.01 of itself, and goes down by the whole rate: 1 - 0.0025 - 0.25.
    found, dtype = losses()
    assert dtype == torch.float32
    torch.testing.assert_close(found, [1.0, 0.7475])


def test_in_bfloat16_too():
    # Casts that outlive a step would give 1 twice. 0.7475 lies between 191 / 256 and 192 / 256, nearer to the former.
    found, dtype = losses(bfloat16=True)
    assert dtype == torch.bfloat16
    assert found == [1.0, 191 / 256]
