"""Outlier channels in a small OPT, as large models have them (InfiniGen, OSDI 2024, Section 4.2, Table 1, Fig. 7).

In OPT of 6.7 billion parameters and more, a few channels of the residual stream are large at every token and hardly
change from layer to layer. Two facts follow, on which InfiniGen rests: the inputs of successive layers are nearly
parallel, and a few columns of queries and keys are large at every token. Models of a few million parameters do not grow
such channels by themselves, so here they are built in, and the model is trained with them:

* ``reserve``, before the training: a few channels stay zero. No table and no layer writes them (rows of ``out_proj``
  and ``fc2``), none reads them. In each head, a few columns of queries and of keys, drawn at random, get a fixed bias
  of ±LARGE; what they read from the other channels is trained.
* ``raise_outliers``, in the midst of it: the position table holds ±A in these channels, at every position, with A² such
  that the outliers have RATIO times the energy of all other channels, where that is largest. LayerNorm now divides by a
  deviation that the outliers dominate; the other channels' gains are raised by as much, so that they come out as large
  as before on average. The large columns now read their constants from the outlier channels, not from their bias.

After that LayerNorm hardly normalizes the other channels any more, a token at a time. A model that was trained with the
outliers from its first step on learned slowly or diverged; so they come late, when the learning rate falls.

What is fixed gets no gradients, and `Fixed.restore` undoes what an optimizer's weight decay does to it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import OPTForCausalLM

RATIO = 6.0
TOKEN_DEVIATION = 0.2  # Of the token table at the beginning: a layer's input is like the next one's from layer 1 on.
POSITION_DEVIATION = 0.1
LAST_GAIN = 0.3  # Of the last LayerNorm at the beginning, so that logits begin small.
LARGE = (6.0, 4.5, 3.0)  # In so many columns of each head's queries, and of its keys.


class Fixed:
    """A parameter of which only those entries learn where ``learns`` is 1."""

    def __init__(self, parameter: torch.Tensor, learns: torch.Tensor) -> None:
        self.parameter, self.learns = parameter, learns.expand_as(parameter).clone()
        parameter.register_hook(lambda gradient: gradient * self.learns)
        self.keep()

    def keep(self) -> None:
        """Take the values that the other entries have now for those that they shall have."""
        self.kept = self.parameter.detach() * (1 - self.learns)

    @torch.no_grad()
    def restore(self) -> None:
        self.parameter.mul_(self.learns).add_(self.kept)


class Outliers:
    """The outlier channels of a model: an even number, spread evenly over its hidden size."""

    def __init__(self, model: OPTForCausalLM, num_channels: int, generator: torch.Generator) -> None:
        self.model, self.hidden = model, model.config.hidden_size
        last_norm = model.model.decoder.final_layer_norm
        assert last_norm is not None  # only OPT of 350 million parameters has none
        self.last_norm = last_norm
        self.channels = (torch.arange(num_channels) * 2 + 1) * self.hidden // (2 * num_channels)
        self.signs = 1.0 - 2.0 * (torch.arange(num_channels) % 2)  # They add to 0: LayerNorm's mean ignores them.
        self.others = torch.ones(self.hidden)
        self.others[self.channels] = 0.0
        self.layers: Any = model.model.decoder.layers  # torch's ModuleList does not say what it holds
        self.readers = [reader for layer in self.layers for reader in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
        self.columns = [self._large_columns(reader, generator) for reader in self.readers]
        self.fixed: list[Fixed] = []
        self.reserve()

    def _large_columns(self, reader, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the large columns of a reader, all heads', and their values."""
        heads = self.model.config.num_attention_heads
        size, count = reader.out_features // heads, len(LARGE)
        columns = [head * size + torch.randperm(size, generator=generator)[:count] for head in range(heads)]
        turns = 1.0 - 2.0 * torch.randint(2, (heads, count), generator=generator)
        return torch.cat(columns), (turns * torch.tensor(LARGE)).flatten()

    @torch.no_grad()
    def reserve(self) -> None:
        """Give the model its first weights, without outliers yet, and fix what shall not learn."""
        decoder, others = self.model.model.decoder, self.others
        tokens, positions = decoder.embed_tokens.weight, decoder.embed_positions.weight
        tokens.mul_(TOKEN_DEVIATION / tokens.std()).mul_(others)
        positions.copy_(waves(len(positions), self.hidden) * POSITION_DEVIATION * math.sqrt(2) * others)
        self.last_norm.weight.fill_(LAST_GAIN)
        self._fix(tokens, others)
        self._fix(positions, others)
        for layer in self.layers:
            for norm in (layer.self_attn_layer_norm, layer.final_layer_norm):
                self._fix(norm.weight, others)
                self._fix(norm.bias, others)
            for writer in (layer.self_attn.out_proj, layer.fc2):
                writer.weight.mul_(others[:, None])
                self._fix(writer.weight, others[:, None])
                self._fix(writer.bias, others)
            for reader in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.fc1):
                reader.weight.mul_(others)
                self._fix(reader.weight, others)
        for reader, (columns, values) in zip(self.readers, self.columns, strict=True):
            reader.bias[columns] = values
            learns = torch.ones_like(reader.bias)
            learns[columns] = 0.0
            self._fix(reader.bias, learns)

    def _fix(self, parameter: torch.Tensor, learns: torch.Tensor) -> None:
        self.fixed.append(Fixed(parameter, learns))

    @torch.no_grad()
    def raise_outliers(self, rows: torch.Tensor) -> float:
        """Set the outliers, from what the other channels hold over ``rows`` of tokens; returns their size."""
        decoder = self.model.model.decoder
        norms = [norm for layer in self.layers for norm in (layer.self_attn_layer_norm, layer.final_layer_norm)]
        norms.append(self.last_norm)
        energies: list[float] = []  # of a norm's input, less its mean: sums of squares over channels

        def look(_module, arguments) -> None:
            energies.append(float(arguments[0].var(-1, correction=0).mean()) * self.hidden)

        handles = [norm.register_forward_pre_hook(look) for norm in norms]
        self.model(rows, use_cache=False)
        for handle in handles:
            handle.remove()
        size = float(torch.tensor(math.sqrt(RATIO * max(energies) / len(self.channels))).bfloat16())  # as it is saved
        outliers = len(self.channels) * size**2
        decoder.embed_positions.weight[:, self.channels] = size * self.signs
        for norm, energy in zip(norms, energies, strict=True):
            norm.weight.mul_(1 + (math.sqrt(1 + outliers / energy) - 1) * self.others)
            norm.weight[self.channels], norm.bias[self.channels] = 1.0, 0.0
        for number, (reader, (columns, values)) in enumerate(zip(self.readers, self.columns, strict=True)):
            energy = energies[2 * (number // 2)]  # of the layer's attention input
            normed = size / math.sqrt((outliers + energy) / self.hidden)
            weights = values[:, None] * self.signs / (normed * len(self.channels))
            reader.weight[columns[:, None], self.channels] = weights
            reader.bias[columns] = 0.0
        for part in self.fixed:
            part.keep()
        return size


def waves(positions: int, hidden: int) -> torch.Tensor:
    """Return sines and cosines of each position (Vaswani et al. 2017, Section 3.5), where neighbours look alike.

    A table drawn at random would have to learn from nothing, at each position, what "the token before" means.
    """
    rates = 10_000.0 ** (-torch.arange(0, hidden, 2) / hidden)
    angles = torch.arange(positions)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
