"""Outlier channels in a small OPT, as large models have them (InfiniGen, OSDI 2024, Section 4.2, Table 1, Fig. 7).

In OPT of 6.7 billion parameters and more, a few channels of the residual stream are large at every token and hardly
change from layer to layer. Two facts follow, on which InfiniGen rests: the inputs of successive layers are nearly
parallel, and a few columns of queries and keys are large at every token. Models of a few million parameters do not grow
such channels by themselves, so here they are built in and frozen:

* the position table holds ±OUTLIER in the outlier channels, at every position; the token table holds zeros there;
* no layer writes these channels: their rows of ``out_proj`` and ``fc2``, weights and biases, are zero;
* LayerNorm divides by a deviation that the outliers dominate, so the gains of the other channels begin where these come
  out with variance 1; the outliers' own gains stay 1, their biases 0;
* in each head, a few columns of ``q_proj`` and ``k_proj``, drawn at random, read the outlier channels with weights that
  make queries and keys about LARGE there. These weights and the biases of these columns are frozen; what the columns
  read from all other channels is trained.

What is frozen gets no gradients, and `Frozen.restore` undoes what an optimizer's weight decay does to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import OPTForCausalLM

OUTLIER = 48.0  # bfloat16 holds it exactly.
TOKEN_DEVIATION = 0.4  # Of the token table at the beginning; the outliers are measured against it.
POSITION_DEVIATION = 0.2
LARGE = (6.0, 4.5, 3.0)  # In so many columns of each head's queries, and of its keys.


@dataclass(frozen=True)
class Frozen:
    """A parameter of which only the entries learn where ``learns`` is 1; it is 0 at the others."""

    parameter: torch.nn.Parameter
    learns: torch.Tensor
    kept: torch.Tensor

    @classmethod
    def of(cls, parameter: torch.nn.Parameter, learns: torch.Tensor) -> Frozen:
        """Freeze the other entries at the values that they have now."""
        learns = learns.expand_as(parameter).clone()
        parameter.register_hook(lambda gradient: gradient * learns)
        return cls(parameter, learns, parameter.detach() * (1 - learns))

    @torch.no_grad()
    def restore(self) -> None:
        self.parameter.mul_(self.learns).add_(self.kept)


def outlier_channels(hidden: int, num_channels: int) -> torch.Tensor:
    """Return the outlier channels, spread evenly over ``hidden``."""
    return (torch.arange(num_channels) * 2 + 1) * hidden // (2 * num_channels)


@torch.no_grad()
def build_in(model: OPTForCausalLM, num_channels: int, generator: torch.Generator) -> list[Frozen]:
    """Give an untrained OPT ``num_channels`` outlier channels, an even number; returns what is frozen of it."""
    decoder, config = model.model.decoder, model.config
    channels = outlier_channels(config.hidden_size, num_channels)
    signs = 1.0 - 2.0 * (torch.arange(num_channels) % 2)  # They add to zero, so that LayerNorm's mean ignores them.
    others = torch.ones(config.hidden_size)
    others[channels] = 0.0
    tokens, positions = decoder.embed_tokens.weight, decoder.embed_positions.weight
    tokens.mul_(TOKEN_DEVIATION / tokens.std()).mul_(others)
    positions.copy_(waves(len(positions), config.hidden_size) * POSITION_DEVIATION * math.sqrt(2) * others)
    positions[:, channels] = OUTLIER * signs
    frozen = [Frozen.of(tokens, others), Frozen.of(positions, others)]
    energy = TOKEN_DEVIATION**2 + POSITION_DEVIATION**2
    gain = math.sqrt(1 + OUTLIER**2 * num_channels / (config.hidden_size * energy))
    for layer in decoder.layers:
        for norm in (layer.self_attn_layer_norm, layer.final_layer_norm):
            norm.weight.copy_(1 + (gain - 1) * others)
            frozen += [Frozen.of(norm.weight, others), Frozen.of(norm.bias, others)]
        for writer in (layer.self_attn.out_proj, layer.fc2):
            writer.weight.mul_(others[:, None])
            frozen += [Frozen.of(writer.weight, others[:, None]), Frozen.of(writer.bias, others)]
        for reader in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            frozen += read_by_few_columns(reader, config.num_attention_heads, channels, signs, generator)
    return frozen


def read_by_few_columns(
    reader: torch.nn.Linear, heads: int, channels: torch.Tensor, signs: torch.Tensor, generator: torch.Generator
) -> list[Frozen]:
    """Let a few columns of each head's queries or keys read the outlier channels; returns what is frozen of them."""
    hidden, size = reader.in_features, reader.out_features // heads
    normed = math.sqrt(hidden / len(channels))  # what LayerNorm makes of an outlier
    weight, bias = torch.ones_like(reader.weight), torch.ones_like(reader.bias)
    for head in range(heads):
        columns = head * size + torch.randperm(size, generator=generator)[: len(LARGE)]
        turns = 1.0 - 2.0 * torch.randint(2, (len(LARGE),), generator=generator)
        values = turns * torch.tensor(LARGE) / (normed * len(channels))
        reader.weight[columns[:, None], channels] = values[:, None] * signs
        weight[columns[:, None], channels] = 0.0
        bias[columns] = 0.0
    return [Frozen.of(reader.weight, weight), Frozen.of(reader.bias, bias)]


def waves(positions: int, hidden: int) -> torch.Tensor:
    """Return sines and cosines of each position (Vaswani et al. 2017, Section 3.5), where neighbours look alike.

    A table drawn at random would have to learn from nothing, at each position, what "the token before" means.
    """
    rates = 10_000.0 ** (-torch.arange(0, hidden, 2) / hidden)
    angles = torch.arange(positions)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
