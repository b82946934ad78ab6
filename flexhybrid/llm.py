"""The offline API, in the shape of vLLM's: ``LLM(model=…).generate(prompts, SamplingParams(…))``."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flexhybrid.arguments import LLMArguments
from flexhybrid.batch.openai import Refused, chat_text
from flexhybrid.batch.tool_calls import check_tools
from flexhybrid.core.errors import InputError, check
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.policy import Policy
from flexhybrid.jobs.machine import notes_on
from flexhybrid.jobs.progress import Progress
from flexhybrid.requests import Generated, RequestOutput, raised
from flexhybrid.runner import OnTrace, Replies, Runner, one_thread_at_a_time
from flexhybrid.runtime.engine import Failure, RunControl
from flexhybrid.runtime.kernels.sampling import SamplingPlan
from flexhybrid.sampling_params import SamplingParams
from flexhybrid.vllm_arguments import absent_method, check_vllm_arguments, nothing_asked, plain_dtype


class LLM(Runner):
    """A local checkpoint under a policy.

    ``model``: a folder in Hugging Face layout. ``policy``: "auto" (searched for each call's lengths on the saved
    profile or a catalogue entry; never profiles by itself), a preset's name, a Policy, or a JSON file. ``device``:
    "auto", "cpu" or "cuda". ``link_gb_per_s`` paces the copies of a CPU; without it nothing is paced and "auto" keeps
    everything resident. ``device_memory`` / ``host_memory`` / ``disk_memory``: budgets ("12GiB", bytes, None for no
    limit). ``disk_dir``: folder of the scratch space for what a policy puts on the disk (the user's cache folder);
    ``disk_gb_per_s`` paces it. ``dtype``: "auto", "float32", "bfloat16" or (CUDA) "float16".

    ``max_model_len``: most tokens of a prompt and its answer together (the model's positions).
    ``generation_config``: "auto" takes the sampling of requests that name none from the checkpoint's file, "none" (or
    "vllm", as there) leaves it be; the tokens that end an answer are the file's either way.
    ``enable_prefix_caching`` (True): prompts that begin alike are computed and kept once as far as they do.
    ``cuda_graphs`` (True): a GPU's decode steps are launched by CUDA graphs where they can be; ``graphs`` says how many
    there were in the latest batch, or why none. vLLM's ``enforce_eager=True`` switches them off too.
    vLLM's further arguments must ask for nothing; the error says what to write instead.

    ``hardware``: the machine by which "auto" and both(…) decide: None for the saved profile, a name of the catalogue,
    or the path of a JSON file.

    Several threads may call ``generate``; they wait for each other. Weights are read at the first ``generate``; they
    and the buffers are kept between calls. ``release()`` gives them back until the next ``generate``; ``close()``, or
    leaving a ``with`` block, for good. Raises InputError, before weights are read, for all that is wrong with the
    checkpoint or the budgets, and warns of budgets beyond the machine's memory.
    """

    def __init__(  # noqa: PLR0913 (vLLM's signature)
        self,
        model: str | Path,
        policy: str | Path | Policy = "auto",
        device: str = "auto",
        link_gb_per_s: float | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        dtype: str = "auto",
        hardware: Hardware | str | Path | None = None,
        disk_dir: str | Path | None = None,
        disk_gb_per_s: float | None = None,
        disk_memory: str | int | None = None,
        max_model_len: int | None = None,
        enable_prefix_caching: bool | None = None,
        generation_config: str | None = None,
        cuda_graphs: bool = True,
        **others,
    ):
        shares = enable_prefix_caching
        check("enable_prefix_caching", shares, shares in (None, True, False), "True or False")
        check("cuda_graphs", cuda_graphs, isinstance(cuda_graphs, bool), "True or False")
        check_vllm_arguments(others, model, list(inspect.signature(LLM).parameters)[:-1])
        self._resolve(
            LLMArguments(
                model,
                policy,
                device,
                plain_dtype(dtype),
                hardware,
                max_model_len=max_model_len,
                enable_prefix_caching=shares is not False,
                generation_config=generation_config or "auto",
                budgets={"device": device_memory, "host": host_memory, "disk": disk_memory},
                link_gb_per_s=link_gb_per_s,
                disk_dir=disk_dir,
                disk_gb_per_s=disk_gb_per_s,
                cuda_graphs=cuda_graphs and not others.get("enforce_eager"),
            )
        )
        for note in notes_on(self.device, self.problem.budgets, None):
            warnings.warn(note, stacklevel=2)

    @one_thread_at_a_time
    def generate(  # noqa: PLR0913 (vLLM's signature)
        self,
        prompts: str | dict | list[str] | list[list[int]] | list[dict],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        on_tokens: Callable[[int], None] | None = None,
        on_answer: Callable[[int, RequestOutput], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        on_trace: OnTrace | None = None,
        num_decoded: Sequence[int] | None = None,
        use_tqdm: bool | None = None,
        **others,
    ) -> list[RequestOutput | None]:
        """Complete every prompt: a text, a list of token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids};
        a single text or dictionary is a list of one.

        Results are in the order of the prompts. ``on_answer(i, answer)`` is called as soon as all n answers to prompt i
        are complete, then ``on_tokens(n)`` with the number of newly generated tokens. Once ``should_stop()`` is true,
        the call ends with the current iteration; answers that are not complete by then are None. ``on_trace`` is called
        with the result of the first wave, whose trace has up to TRACED_TASKS tasks.

        ``use_tqdm``: whether progress is shown on stderr (None: on a terminal, unless ``on_tokens`` takes it). vLLM's
        ``lora_request`` and ``priority`` must be left out or None.

        ``sampling_params``: one for all prompts, or a list of one a prompt; None: those of
        ``get_default_sampling_params``. Random numbers depend on the seed and the position in the text, so that
        equal prompts with one seed get equal answers; without a seed all differ. Answer k of n draws with seed + k. A
        seed gives its request the tokens that it gets alone, except for near ties and
        under InfiniGen's selection, whose columns are chosen over all requests of a mini-batch. Raises InputError,
        before any work, for a prompt that is empty, too long or holds an unknown token id, and for budgets too small
        for a single one of the requests.

        ``num_decoded``: how many of each prompt's last tokens pass the decode one by one instead of the prefill, for
        answers that show what a lossy policy makes of the prompt itself.

        Any other error on the way (a disk that fails, Ctrl-C, an error of ``on_tokens``) first gives all memory and
        disk space back; the next call loads the weights anew.
        """
        nothing_asked(**others)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        requests = self.codec.encode(prompts, sampling_params, num_decoded)
        answers: list[RequestOutput | None] = [None] * len(requests.prompts)
        if not answers:
            return []
        replies, first_id = Replies(self.codec), self._num_prompts
        self._num_prompts += len(answers)

        def begin(request: int) -> tuple[Generated, SamplingPlan]:
            return self.codec.begin(requests, request), requests.plan.select(np.array([request]))

        def completed(request: int, generated: Generated) -> None:
            progress.finished(requests.max_tokens[request] - len(generated.token_ids))
            place = requests.answers[request][0]
            if isinstance(generated.stop, Failure):
                raise InputError(f"prompt {place}: {generated.stop}")
            text = prompt if isinstance(prompt := requests.prompts[place], str) else None
            answers[place] = reply = replies.add(place, generated, text, str(first_id + place))
            if reply and on_answer:
                on_answer(place, reply)

        shows = sys.stderr.isatty() and not on_tokens if use_tqdm is None else bool(use_tqdm)
        progress = Progress(sum(requests.max_tokens), "generate", "tok", quiet=not shows, answers=len(requests.ids))

        def counted(num_tokens: int) -> None:
            progress.advance(num_tokens)
            if on_tokens:
                on_tokens(num_tokens)

        hears = RunControl(on_tokens=counted, should_stop=should_stop)
        with progress:
            self.answer(requests.workload, begin, completed, hears, on_trace, joining=not any(requests.num_decoded))
        return answers

    def chat(  # noqa: PLR0913 (vLLM's signature)
        self,
        messages: list,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict] | None = None,
        chat_template_content_format: str = "auto",
        **others,
    ) -> list[RequestOutput | None]:
        """Answer a conversation, which is a list of {"role": …, "content": …}, or each of a list of them.

        ``chat_template``: a Jinja text in place of the tokenizer's own; ``chat_template_kwargs``: further variables of
        it; ``chat_template_content_format``: contents are given to it as a "string", as "openai" parts, or as it shows
        them ("auto"); ``add_generation_prompt`` and ``continue_final_message`` are transformers'; ``tools``: those that
        an answer may call, in the template's own form, in which ``flexhybrid.batch.tool_calls.find_calls`` finds them.
        ``prompt`` of an answer is the text that the template makes. The rest as in ``generate``; vLLM's other arguments
        must ask for nothing.
        """
        nothing_asked(**others)
        form, variables = chat_template_content_format, dict(chat_template_kwargs or {})
        check("chat_template_content_format", form, form in ("auto", "string", "openai"), "auto, string or openai")
        variables |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        if tools:
            check_tools(tools)
        many = messages if messages and all(isinstance(one, (list, tuple)) for one in messages) else [messages]
        texts, encoded = self._conversations(many, chat_template, variables, tools, form)
        answers = self.generate([{"prompt_token_ids": ids} for ids in encoded], sampling_params, use_tqdm=use_tqdm)
        return [answer and replace(answer, prompt=text) for text, answer in zip(texts, answers)]

    def _conversations(
        self, many: list, template: str | None, variables: dict, tools: list[dict] | None, form: str
    ) -> tuple[list[str], list[list[int]]]:
        """Return the conversations in the template, as texts and as token ids. Raise InputError."""
        texts = list[str]()
        for place, conversation in enumerate(many):
            try:
                texts.append(chat_text(list(conversation), self.tokenizer, template, variables, tools, form))
            except Refused as refused:
                raise InputError(f"conversation {place}: {refused.message}") from None
        asked = [(text, SamplingParams()) for text in texts]
        return texts, raised(self.codec.check_all(asked, "conversation {}".format, special_tokens=False))

    def get_tokenizer(self):
        """Return transformers' tokenizer of the checkpoint; None without one."""
        return self.tokenizer

    if not TYPE_CHECKING:  # a checker of types would take every name for known

        def __getattr__(self, name: str):
            raise AttributeError(absent_method(name), name=name, obj=self)
