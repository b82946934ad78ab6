"""The Python API, similar to vLLM's: ``LLM(model=…).generate(prompts, SamplingParams(…))``."""

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

    - ``model``: a folder in Hugging Face layout.
    - ``policy``: "auto", a preset's name, a Policy, or a JSON file. "auto" searches for each call's lengths with the
      saved profile or a catalogue entry; it never measures the machine.
    - ``device``: "auto", "cpu" or "cuda". ``dtype``: "auto", "float32", "bfloat16" or (CUDA) "float16".
    - ``device_memory``, ``host_memory``, ``disk_memory``: budgets ("12GiB", bytes, or None for no limit).
    - ``link_gb_per_s``: rate of an imitated link on a CPU; without it, "auto" keeps everything on the device.
    - ``disk_dir``: scratch folder (default: in the user's cache folder). ``disk_gb_per_s``: limit on its rate.
    - ``hardware``: rates for "auto" and both(…): a catalogue name, a JSON file, or None for the saved profile.
    - ``max_model_len``: most tokens of a prompt and its answer together (default: the model's positions).
    - ``generation_config``: "auto" takes default sampling parameters from the checkpoint's file; "none" or "vllm" does
      not. The file's end-of-sequence tokens are used in each case.
    - ``enable_prefix_caching`` (default: True): compute and keep shared beginnings of prompts once.
    - ``cuda_graphs`` (default: True): launch decode steps on a GPU with CUDA graphs if possible. ``graphs`` has their
      number in the latest batch, or the reason why there are none. ``enforce_eager=True`` also switches them off.

    Other arguments of vLLM must have values without effect; the error tells what to write instead.

    Several threads may call ``generate``; they wait for each other. Weights are read at the first ``generate``, and
    kept with the buffers between calls. ``release()`` frees them until the next ``generate``. After ``close()``, or a
    ``with`` block, the LLM cannot be used again. Raise InputError, before weights are read, for a wrong checkpoint or
    budget; warn of budgets beyond the machine's memory.
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
        """Complete every prompt; return the results in the order of the prompts.

        A prompt is a text, a list of token ids, or vLLM's {"prompt": text} or {"prompt_token_ids": ids}. A single text
        or dictionary is a list of one.

        - ``sampling_params``: one for all prompts, or a list (default: that of ``get_default_sampling_params``).
        - ``on_answer(i, answer)``: called as soon as all n answers to prompt i are complete.
        - ``on_tokens(n)``: called after each iteration with the number of new tokens.
        - ``should_stop()``: once True, the call ends after the current iteration; incomplete answers are None.
        - ``on_trace``: called with the result of the first wave, whose trace has up to TRACED_TASKS tasks.
        - ``num_decoded``: number of each prompt's last tokens that are decoded one by one instead of in the prefill, so
          that the answers show how a lossy policy treats the prompt itself.
        - ``use_tqdm``: whether to show progress on stderr (default: on a terminal, unless ``on_tokens`` is given).

        vLLM's ``lora_request`` and ``priority`` must be left out or None.

        Random numbers depend on the seed and the position in the text: equal prompts with equal seeds get equal
        answers, and answer k of n draws with seed + k. Without a seed, all answers differ. Other requests do not change
        the tokens of a seeded request, except at near ties, and under InfiniGen's selection, which chooses columns for
        all requests of a mini-batch.

        Raise InputError, before any work, for a prompt that is empty, too long or has an unknown token id, and for
        budgets too small for one of the requests. Any other error (a failing disk, Ctrl-C, an error in ``on_tokens``)
        frees all memory and disk space; the next call loads the weights again.
        """
        nothing_asked(self.generate, others)
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

        callbacks = RunControl(on_tokens=counted, should_stop=should_stop)
        with progress:
            self.answer(requests.workload, begin, completed, callbacks, on_trace, joining=not any(requests.num_decoded))
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
        """Answer a conversation, a list of {"role": …, "content": …}, or each conversation of a list.

        - ``chat_template``: a Jinja text in place of the tokenizer's own. ``chat_template_kwargs``: more variables.
        - ``chat_template_content_format``: whether the template gets contents as a "string", as "openai" parts, or in
          the form that it prints ("auto").
        - ``add_generation_prompt``, ``continue_final_message``: as in transformers.
        - ``tools``: tools that an answer may call; ``flexhybrid.batch.tool_calls.find_calls`` finds the calls.

        ``prompt`` of an answer is the formatted conversation. The other arguments are those of ``generate``; vLLM's
        must have values without effect.
        """
        nothing_asked(self.chat, others)
        wanted = 'a list of messages such as {"role": "user", "content": "…"}, or a list of such lists'
        check("messages", messages, isinstance(messages, (list, tuple)), wanted)
        form, variables = chat_template_content_format, dict(chat_template_kwargs or {})
        check("chat_template_content_format", form, form in ("auto", "string", "openai"), "auto, string or openai")
        variables |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        if tools:
            check_tools(tools)
        many = messages if messages and all(isinstance(one, (list, tuple)) for one in messages) else [messages]
        texts = _conversations(many, self.tokenizer, chat_template, variables, tools, form)
        asked = [(text, SamplingParams()) for text in texts]
        encoded = raised(self.codec.check_all(asked, "conversation {}".format, special_tokens=False))
        answers = self.generate([{"prompt_token_ids": ids} for ids in encoded], sampling_params, use_tqdm=use_tqdm)
        return [answer and replace(answer, prompt=text) for text, answer in zip(texts, answers)]

    def get_tokenizer(self):
        """Return transformers' tokenizer of the checkpoint; None without one."""
        return self.tokenizer

    if not TYPE_CHECKING:  # otherwise a type checker would accept every name

        def __getattr__(self, name: str):
            raise AttributeError(absent_method(name), name=name, obj=self)


def _conversations(many: list, tokenizer, template: str | None, variables: dict, tools, form: str) -> list[str]:
    """Return the formatted conversations. Raise InputError for the first wrong one."""
    texts = list[str]()
    for place, conversation in enumerate(many):
        try:
            texts.append(chat_text(list(conversation), tokenizer, template, variables, tools, form))
        except Refused as refused:
            raise InputError(f"conversation {place}: {refused.message}") from None
    return texts
