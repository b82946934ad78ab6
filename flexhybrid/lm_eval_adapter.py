"""lm-evaluation-harness on flexhybrid: ``python -m flexhybrid.lm_eval_adapter run --model flexhybrid …``.

This module registers the model ``flexhybrid`` and then runs the harness's command line. The model's arguments are those
of ``LLM``: ``--model_args "pretrained=PATH,policy=infinigen(alpha=4,cap=0.2)"``. Texts are cut to the model's length as
by ``--model hf``, so that an exact policy has equal scores.

A prefill attends to all of its tokens in full precision under every policy, so a one-token answer would not show the
errors of a lossy policy. Therefore the last ``decode_context`` (a share of the tokens) of each context is decoded token
by token. The default is 0.8 for a lossy policy, as InfiniGen's own evaluation leaves out the first 20 %, else 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, handle_arg_string, make_disjoint_window
from tqdm import tqdm

from flexhybrid.core.errors import InputError
from flexhybrid.core.workload import Workload
from flexhybrid.llm import LLM
from flexhybrid.resolve import settle_policy
from flexhybrid.sampling_params import SamplingParams
from flexhybrid.scoring import Score, score

MAX_ANSWER_TOKENS = 256  #: most tokens of an answer if the task has no limit, as for the harness's own models
LOSSY_DECODE_CONTEXT = 0.8  #: share of a context that is decoded token by token under a lossy policy

Answer = tuple[float, bool]  #: sum of log-probabilities, and whether greedy decoding gives these tokens


@register_model("flexhybrid")
class FlexHybridLM(TemplateLM):
    """The harness's interface to an ``LLM``. Contexts that are too long lose their beginning.

    The harness passes ``device``, ``batch_size`` and ``max_batch_size`` to every model. The sizes are ignored: the
    budgets decide how many requests run together. So is any device except "cpu", since the harness passes "cuda:0" even
    without a GPU. Answers go to the harness's cache (``--use_cache``) as soon as they are complete. Raise InputError
    for a checkpoint without tokenizer files, and for a ``decode_context`` outside of 0 to 1.
    """

    def __init__(self, pretrained: str, policy: str = "auto", device: str | None = None, batch_size=None,
                 max_batch_size=None, decode_context: float | None = None, **options):  # fmt: skip
        super().__init__()
        self.llm = LLM(pretrained, policy, device="cpu" if device == "cpu" else "auto", **options)
        if self.llm.tokenizer is None:
            raise InputError(f"{self.llm.checkpoint.path} has no tokenizer files, which the tasks' texts need")
        self.tokenizer = self.llm.tokenizer
        if decode_context is None:
            chosen = self.llm.requested_policy
            if isinstance(chosen, str) and chosen != "auto":
                chosen = settle_policy(chosen, self.llm.problem, Workload.uniform(1, 16, 16))
            lossless = isinstance(chosen, str) or chosen.lossless  # "auto" is lossless for all requests
            decode_context = 0.0 if lossless else LOSSY_DECODE_CONTEXT
        if not isinstance(decode_context, (int, float)) or not 0 <= decode_context <= 1:
            raise InputError(f"decode_context is {decode_context!r}; it is a share of a context's tokens, from 0 to 1")
        self.decode_context = decode_context

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> FlexHybridLM:
        """Return the model of ``key=value,…``, in which commas within parentheses belong to a policy."""
        pairs = [pair.partition("=") for pair in re.split(r",(?![^()]*\))", arg_string) if pair.strip()]
        arguments = {key.strip(): handle_arg_string(value) for key, _, value in pairs}
        return cls.create_from_arg_obj(arguments, additional_config)

    @property
    def max_length(self) -> int:
        """The most tokens of a context; one more token may be scored after them."""
        return self.llm.shape.max_context

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.checkpoint.path)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Return a text's token ids, without a second prefix token if the text begins with one."""
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer(string, verbose=False, **special)["input_ids"]

    def _num_decoded(self, num_context: int) -> int:
        """Return the number of a context's tokens that are decoded one by one; at least one is not."""
        return min(int(self.decode_context * num_context), num_context - 1)

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, on_answer: Callable[[int, Answer], None] | None = None, **kwargs
    ) -> list[Answer]:
        """Return the answer to each request (texts, context ids, continuation ids).

        ``on_answer(i, answer)`` is called as soon as answer i is known. Requests that differ only in their last token,
        like the choices of a question, are scored as one text.
        """
        answers: list[Answer] = [(0.0, True)] * len(requests)
        groups: dict[tuple[tuple[int, ...], int], list[int]] = {}  # (text without its last token, scored) -> requests
        for i, (_, context, continuation) in enumerate(requests):
            count = len(continuation)
            if count > self.max_length:
                raise InputError(f"a continuation of {count} tokens: the model takes {self.max_length}")
            if count:
                text = (context + continuation)[-self.max_length - 1 : -1]
                groups.setdefault((tuple(text), count), []).append(i)
        members = list(groups.values())
        last_tokens = [[requests[i][2][-1] for i in group] for group in members]
        texts = [[*text, last[0]] for (text, _), last in zip(groups, last_tokens)]
        num_forced = [count + self._num_decoded(len(text) + 1 - count) for text, count in groups]

        def scored(place: int, text_score: Score) -> None:
            for i in members[place]:
                strings, _, continuation = requests[i]
                before_last = text_score.logprobs[-len(continuation) : -1].sum()
                logprob = float(before_last) + text_score.last_logprobs[continuation[-1]]
                answers[i] = (logprob, text_score.greedy[-len(continuation) :].tolist() == continuation)
                if on_answer:
                    on_answer(i, answers[i])
                if strings is not None:
                    self.cache_hook.add_partial("loglikelihood", strings, answers[i])
            progress.update(len(members[place]))

        with tqdm(total=sum(map(len, members)), desc="continuations", disable=disable_tqdm) as progress:
            score(self.llm, texts, num_forced, on_score=scored, last_tokens=last_tokens)
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Return the sum of log-probabilities of all tokens of each text, in windows of the model's length."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(owner)
        sums, left = [0.0] * len(requests), [owners.count(owner) for owner in range(len(requests))]

        def add(window: int, answer: Answer) -> None:
            owner = owners[window]
            sums[owner] += answer[0]
            left[owner] -= 1
            if not left[owner]:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[owner].args, sums[owner])

        self._loglikelihood_tokens(windows, disable_tqdm, on_answer=add)
        return sums

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Return the answers. As the harness requires, decoding is greedy unless a task requests sampling."""
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            options: dict[str, Any] = dict(normalize_gen_kwargs(options, MAX_ANSWER_TOKENS))
            ids = self.tok_encode(context)
            max_tokens = min(options["max_gen_toks"], self.max_length - 1)
            prompts.append(ids[-(self.max_length - max_tokens) :])
            sampled = {key: options[key] for key in ("top_p", "top_k", "min_p") if key in options}
            temperature = options.get("temperature", 1.0) if options["do_sample"] else 0.0
            stops = [stop for stop in options["until"] if stop]
            params.append(SamplingParams(max_tokens=max_tokens, stop=stops, temperature=temperature, **sampled))
        texts = [""] * len(requests)

        def answered(i: int, answer) -> None:
            texts[i] = answer.outputs[0].text
            self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
            progress.update()

        decoded = [self._num_decoded(len(prompt)) for prompt in prompts]
        with tqdm(total=len(requests), desc="answers", disable=disable_tqdm) as progress:
            self.llm.generate(prompts, params, on_answer=answered, num_decoded=decoded)
        return texts


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
