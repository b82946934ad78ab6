"""Torch modules as models of a cascade: any module, and encoders of transformers (BERT, ViT) from their folder.

A request to an encoder is a text, a pair of texts (two sentences, or a question and its context), a row of token ids,
or the pixel values of an image. Texts of a batch are padded to the longest one; padding is never part of an answer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flexhybrid.cascade.exported import load_program
from flexhybrid.cascade.models import ModelOutputs, called, first_line
from flexhybrid.core.errors import InputError


class TorchModel:
    """A torch module that maps rows [B, …] to logits [B, C], or for extraction to two such tensors: start and end."""

    def __init__(self, name: str, source: str, task: str = "classification", place: Any = "cpu"):
        import torch

        self.name, self.task, self.place = name, task, torch.device(place)
        self.device = self.place.type
        self.module: Any = self.load(source)

    def load(self, source: str) -> Any:
        """Return the module on its device. Raise InputError if it cannot be loaded."""
        return _torch_module(self.name, source, self.place)

    def logits(self, batch: Sequence | np.ndarray) -> Sequence:
        """Return the module's logits for a batch: one or two tensors [B, C]."""
        import torch

        result = self.module(torch.as_tensor(np.asarray(batch)).to(self.place))
        return result if isinstance(result, (tuple, list)) else (result,)

    def predict(self, batch: Sequence | np.ndarray) -> ModelOutputs:
        import torch

        with torch.inference_mode():
            parts = self.logits(batch)
            logits = np.stack([part.double().cpu().numpy() for part in parts], axis=1)
        num_slots = 2 if self.task == "extraction" else 1
        if logits.ndim != 3 or logits.shape[:2] != (len(batch), num_slots):
            raise ValueError(f"{self.name} gave logits of shape {logits.shape} for {len(batch)} requests")
        chosen = logits.argmax(axis=-1)
        outputs = chosen.tolist() if self.task == "extraction" else chosen[:, 0].tolist()
        return ModelOutputs(outputs, logits, np.ones(logits.shape[:2], dtype=bool))

    def memory_bytes(self, batch: Sequence | np.ndarray) -> int:
        """Return the bytes of the weights and the peak bytes of other tensors during a batch.

        On a GPU, torch's allocator counts them, with the workspace of operators; on a CPU, only tensors are counted.
        """
        import torch

        from flexhybrid.runtime.models.allocations import peak_bytes

        tensors = [*self.module.parameters(), *self.module.buffers()]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        weights = sum(storages.values())
        if self.device != "cuda":
            return weights + peak_bytes(lambda: self.predict(batch))
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - weights
        self.predict(batch)
        return torch.cuda.max_memory_allocated() - others

    def close(self) -> None:
        """Release the module."""
        del self.module


def _torch_module(name: str, source: str, place):
    """Return the module of a .pt2 file or a function. Raise InputError if there is none."""
    import torch

    if source.endswith(".pt2"):
        try:
            program = load_program(source)
            if place.type != "cpu":
                from torch.export.passes import move_to_device_pass

                program = move_to_device_pass(program, place)
            return program.module(check_guards=False)  # guards would be code from the file
        except Exception as error:  # torch raises many types for a damaged file
            raise InputError(f"cannot read {source} of model {name}: {first_line(error)}") from None
    if ":" not in source:
        raise InputError(
            f"model {name}: {source!r} is neither a .pt2 file of torch.export, nor a checkpoint folder, nor "
            "module:function"
        )
    try:
        module = called(source)
    except Exception as error:
        raise InputError(f"model {name}: {source} failed: {first_line(error)}") from None
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"model {name}: {source} returned {type(module).__name__}, not a torch module")
    return module.eval().to(place)


#: Task -> endings of the names of transformers' classes with a head for it.
HEADS = {
    "classification": ("ForSequenceClassification", "ForImageClassification"),
    "extraction": ("ForQuestionAnswering",),
}
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")  #: files that show that there is a tokenizer


class Encoder(TorchModel):
    """An encoder of transformers with the head in its config, in the dtype of its checkpoint."""

    def load(self, source: str) -> Any:
        import transformers

        self.tokenizer = None
        try:
            config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
            architecture = (config.architectures or ["none"])[0]
        except Exception as error:  # transformers raises many types
            raise InputError(
                f"model {self.name}: {source} has no config of transformers: {first_line(error)}"
            ) from None
        if not architecture.endswith(HEADS[self.task]):
            raise InputError(
                f"model {self.name}: {source} has the class {architecture}; {self.task} needs one that ends with "
                f"{' or '.join(HEADS[self.task])}"
            )
        try:
            kind = getattr(transformers, architecture)
            module = kind.from_pretrained(source, local_files_only=True)
            if any((Path(source) / name).is_file() for name in TOKENIZERS):
                self.tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
        except Exception as error:
            raise InputError(
                f"model {self.name}: cannot load {architecture} in {source}: {first_line(error)}"
            ) from None
        return module.eval().to(self.place)

    def logits(self, batch: Sequence | np.ndarray) -> Sequence:
        import torch

        inputs = {name: tensor.to(self.place) for name, tensor in self._inputs(batch).items()}
        result = self.module(**inputs)
        if self.task == "classification":
            return (result.logits,)
        outside = inputs["attention_mask"] == 0
        return [part.masked_fill(outside, -torch.inf) for part in (result.start_logits, result.end_logits)]

    def _inputs(self, batch: Sequence | np.ndarray) -> dict:
        """Return the module's arguments. Raise ValueError for requests that the model does not support."""
        import torch

        if not isinstance(batch, np.ndarray) and any(isinstance(one, (str, list)) for one in batch):
            return self._tokens(batch)
        x = torch.as_tensor(np.asarray(batch))
        if self.module.main_input_name == "pixel_values":
            if not x.is_floating_point():
                raise ValueError(f"{self.name} takes pixel values from its image processor, not {x.dtype}")
            return {"pixel_values": x.to(self.module.dtype)}
        if x.is_floating_point() or x.ndim != 2:
            raise ValueError(f"{self.name} takes texts or rows of token ids, not {x.dtype} of shape {list(x.shape)}")
        pad = self.module.config.pad_token_id
        kept = torch.ones_like(x) if pad is None else torch.ne(x, pad)
        return {"input_ids": x.long(), "attention_mask": kept.long()}

    def _tokens(self, batch: Sequence) -> dict:
        """Return the encoded texts, or pairs of texts. Raise ValueError if they do not suit the model."""
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer, so it takes no texts")
        pairs = [tuple(one) if isinstance(one, list) else (one, None) for one in batch]
        if len({second is None for _, second in pairs}) > 1:
            raise ValueError("texts and pairs of texts in one batch")
        firsts, seconds = (list(part) for part in zip(*pairs))
        encoded = self.tokenizer(firsts, None if seconds[0] is None else seconds, padding=True, return_tensors="pt")
        most, length = getattr(self.module.config, "max_position_embeddings", None), encoded["input_ids"].shape[1]
        if most is not None and length > most:
            raise ValueError(f"a text has {length} tokens; {self.name} takes up to {most}")
        return dict(encoded)
