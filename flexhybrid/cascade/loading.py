"""Loads the models of a cascade by name, path, device and policy."""

from collections.abc import Sequence
from pathlib import Path

from flexhybrid.cascade.models import TOP_K, Generator, Model, called, first_line
from flexhybrid.core.errors import InputError, unknown


def named_path(text: str) -> tuple[str, str]:
    """Return name and path of "NAME=PATH". Raise InputError for other texts."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise InputError(f"{text!r} is not NAME=PATH")
    return name, path


def named_policies(texts: Sequence[str], names: Sequence[str], task: str) -> dict[str, dict[str, str]]:
    """Return model name -> options of ``load_model``, from texts "NAME=POLICY".
    Raise InputError for another name, or if the task is not generation."""
    if texts and task != "generation":
        raise InputError(f"policies are for language models only: the task is {task}")
    policies = dict(map(named_path, texts))
    if strange := [name for name in policies if name not in names]:
        raise unknown("model in --policies", strange[0], names)
    return {name: {"policy": policy} for name, policy in policies.items()}


def check_source(name: str, source: str, task: str) -> None:
    """Raise InputError if a model's file or folder is missing."""
    if task == "generation" and ":" not in source and not Path(source).is_dir():
        raise InputError(f"model {name}: {source} is neither a checkpoint folder nor module:function")
    if task != "generation" and source.endswith(".pt2") and not Path(source).is_file():
        raise InputError(f"cannot read {source} of model {name}: there is no such file")


def own_model(name: str, source: str) -> Model:
    """Return the model that "package.module:function" returns, with this name. Raise InputError if it returns none."""
    try:
        model = called(source)
    except Exception as error:  # the function may raise anything
        raise InputError(f"model {name}: {source} failed: {type(error).__name__}: {first_line(error)}") from None
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
    """Load a local model on ``device``: "cpu", "cuda", or "auto" (a GPU if torch finds one).

    ``source`` for generation: a checkpoint folder, or "package.module:function" that returns a ``Model``.
    ``llm_options`` are arguments of ``flexhybrid.LLM``. For other tasks: a checkpoint folder of an encoder of
    transformers, a file of torch.export (.pt2), or "package.module:function" that returns a torch module. Raise
    InputError if the model cannot be loaded.
    """
    from flexhybrid.cascade.torch_models import Encoder, TorchModel
    from flexhybrid.resolve import pick_device

    check_source(name, source, task)
    if task == "generation":
        if not Path(source).is_dir():
            if llm_options:
                raise InputError(f"model {name}: {', '.join(llm_options)} needs a checkpoint, which {source} is not")
            return own_model(name, source)
        return Generator(name, source, max_tokens, top_k, device=device, **llm_options)
    place = pick_device(device).device
    return (Encoder if Path(source).is_dir() else TorchModel)(name, source, task, place)
