"""Convert a checkpoint's tensors for transformers' modules: rename, stack and split them as transformers does.

One tensor or one stack of experts is converted at a time. transformers does the same in its core_model_loading
(``convert_and_load_state_dict_in_model``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy

import torch

from flexhybrid.core.errors import InputError
from flexhybrid.runtime.models.transformer import own_name

#: Function that reads a tensor of the checkpoint.
Read = Callable[[], torch.Tensor]


class Conversion:
    """Converts a checkpoint's tensors (``names``) to a model's, in steps. A step gives one tensor or several."""

    def __init__(self, model, names: list[str]):
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import (
                WeightConverter,
                WeightRenaming,
                dot_natural_key,
                rename_source_key,
            )
        except ImportError as error:
            raise InputError(f"this version of transformers converts weights in an unknown way: {error}") from None
        self.model, own = model, model.state_dict()
        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        of_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        self._steps: dict[str, tuple] = {}  #: first model tensor -> transform, [(pattern, checkpoint name)]
        for name in sorted(names, key=dot_natural_key):
            alone = own_name(name)
            target, pattern = rename_source_key(alone, renamings, converters, model.base_model_prefix, own)
            if target not in own and alone in own:
                target, pattern = alone, None
            if target not in own:
                continue
            transform = deepcopy(of_pattern[pattern]) if pattern else WeightRenaming(name, target)
            self._steps.setdefault(target, (transform, []))[1].append((pattern or name, name))

    @property
    def renamed(self) -> dict[str, str]:
        """Return {model tensor: checkpoint tensor} for steps with a single checkpoint tensor."""
        return {first: sources[0][1] for first, (_, sources) in self._steps.items() if len(sources) == 1}

    def sources(self) -> dict[str, bool]:
        """Return {checkpoint tensor: whether it becomes floating-point numbers} for all tensors that are used."""
        own = self.model.state_dict()
        steps = self._steps.items()
        return {name: own[first].is_floating_point() for first, (_, parts) in steps for _, name in parts}

    def sources_of(self, first: str) -> list[str]:
        """Return the checkpoint tensors of a step, in order."""
        return [name for _, name in self._steps[first][1]]

    def __iter__(self) -> Iterator[str]:
        """Yield the first model tensor of each step."""
        return iter(self._steps)

    def tensors(self, first: str, read: Mapping[str, Read]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (model tensor's name, tensor) of the step whose first tensor is ``first``."""
        transform, sources = self._steps[first]
        transform = deepcopy(transform)
        for pattern, name in sources:
            transform.add_tensor(first, name, pattern, read[name])
        with torch.no_grad():
            made = transform.convert(first, model=self.model, config=self.model.config)
        for name, tensor in made.items():
            yield name, tensor[0] if isinstance(tensor, list) else tensor
