"""Where a cascade's models come from: names with paths, devices and policies in, models out."""

from collections.abc import Sequence
from pathlib import Path

from flexhybrid.cascade.models import TOP_K, Generator, Model, called, first_line
from flexhybrid.core.errors import InputError, unknown


def named_path(text: str) -> tuple[str, str]:
    """Split "NAME=PATH"; raises InputError for other texts."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise InputError(f"{text!r} is not NAME=PATH")
    return name, path


def named_policies(texts: Sequence[str], names: Sequence[str], task: str) -> dict[str, dict[str, str]]:
    """Return texts "NAME=POLICY" as options of ``load_model``, by model. InputError for another name or task."""
    if texts and task != "generation":
        raise InputError(f"policies are of language models: the task is {task}")
    policies = dict(map(named_path, texts))
    if strange := [name for name in policies if name not in names]:
        raise unknown("model in --policies", strange[0], names)
    return {name: {"policy": policy} for name, policy in policies.items()}


def check_source(name: str, source: str, task: str) -> None:
    """Raise InputError where a model's file or folder is missing, before anything is loaded."""
    if task == "generation" and ":" not in source and not Path(source).is_dir():
        raise InputError(f"model {name}: {source} is no folder of a checkpoint, nor module:function")
    if task != "generation" and source.endswith(".pt2") and not Path(source).is_file():
        raise InputError(f"cannot read {source} of model {name}: there is no such file")


def own_model(name: str, source: str) -> Model:
    """Return what "package.module:function" returns as the model ``name``. InputError where it is none."""
    try:
        model = called(source)
    except Exception as error:  # whatever the function raises
        raise InputError(f"model {name}: {source} gave no model: {type(error).__name__}: {first_line(error)}") from None
    if not all(callable(getattr(model, method, None)) for method in ("predict", "close")):
        raise InputError(f"model {name}: {source} returned {type(model).__name__}, which lacks predict or close")
    model.name = name
    return model


def load_model(
    name: str,
    source: str,
    task: str,
    max_tokens: int = 1,
    top_k: int | None = TOP_K,
    device: str = "auto",
    **llm_options,
) -> Model:
    """Load a local model on ``device``: "cpu", "cuda", or "auto": a GPU if torch finds one.

    Generation: a checkpoint folder, with the options of ``flexhybrid.LLM``, or "package.module:function" that returns a
    ``Model``. Else a torch module: a checkpoint folder of an encoder of transformers, a file of torch.export (.pt2), or
    "package.module:function" that returns a module. InputError where it cannot be had.
    """
    from flexhybrid.cascade.torch_models import Encoder, TorchModel
    from flexhybrid.resolve import pick_device

    check_source(name, source, task)
    if task == "generation":
        if not Path(source).is_dir():
            if llm_options:
                raise InputError(f"model {name}: {', '.join(llm_options)} is for checkpoints, and {source} is none")
            return own_model(name, source)
        return Generator(name, source, max_tokens, top_k, device=device, **llm_options)
    place = pick_device(device).device
    return (Encoder if Path(source).is_dir() else TorchModel)(name, source, task, place)
