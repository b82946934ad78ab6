"""lm-evaluation-harness on flexhybrid: ``python -m flexhybrid.lm_eval_adapter run --model flexhybrid …``.

The harness has no list of other people's models: this module puts ``flexhybrid`` on its own and then is its command
line. Arguments of the model are ``LLM``'s: ``--model_args pretrained=PATH,policy=h2o(0.2)``. Continuations are scored
through the policy's cache, token by token (``flexhybrid.scoring``).
"""

from __future__ import annotations

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports] (optional)
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports] (optional)
from lm_eval.models.utils import normalize_gen_kwargs  # pyright: ignore[reportMissingImports] (optional)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports] (optional)

from flexhybrid.core.errors import InputError
from flexhybrid.llm import LLM
from flexhybrid.sampling_params import SamplingParams
from flexhybrid.scoring import score

MAX_ANSWER_TOKENS = 256  #: of a task that names no bound, as for the harness's own models


@register_model("flexhybrid")
class FlexHybridLM(TemplateLM):
    """The harness's view of an ``LLM``. Contexts that are too long lose their beginning.

    The harness hands ``device``, ``batch_size`` and ``max_batch_size`` to every model: "cuda:0" whether or not there is
    a GPU, so that only "cpu" says anything; requests run together as far as the budgets allow.
    """

    def __init__(self, pretrained: str, policy: str = "auto", device: str | None = None, batch_size=None,
                 max_batch_size=None, **options):  # fmt: skip
        super().__init__()
        self.llm = LLM(pretrained, policy, device="cpu" if device == "cpu" else "auto", **options)
        if self.llm.tokenizer is None:
            raise InputError(f"{self.llm.checkpoint.path} has no tokenizer files: tasks are texts")
        self.tokenizer = self.llm.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What comes before a text that has no context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.checkpoint.path)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer(string, verbose=False, **special)["input_ids"]

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """(sum of log-probabilities, whether greedy decoding gives it) of each (texts, context ids, continuation
        ids)."""
        longest = self.llm.shape.max_context
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        texts, counts, places = [], [], []
        for place, (_, context, continuation) in enumerate(requests):
            if not continuation:
                continue
            if len(continuation) >= longest:
                raise InputError(
                    f"a continuation of {len(continuation)} tokens: model {self.llm.shape.name} takes {longest}, "
                    "context included"
                )
            texts.append((context + continuation)[-longest:])
            counts.append(len(continuation))
            places.append(place)
        for place, text, count, scored in zip(places, texts, counts, score(self.llm, texts, counts), strict=True):
            answers[place] = (scored.logprob, scored.greedy.tolist() == text[-count:])
        for (strings, _, _), answer in zip(requests, answers, strict=True):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, answer)
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Sum of log-probabilities of all tokens of each text, in windows of the model's length."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.llm.shape.max_context - 1, 1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            options = normalize_gen_kwargs(options, MAX_ANSWER_TOKENS)
            ids = self.tok_encode(context)
            max_tokens = min(options["max_gen_toks"], self.llm.shape.max_context - 1)
            prompts.append(ids[-(self.llm.shape.max_context - max_tokens) :])
            known = {key: options[key] for key in ("temperature", "top_p", "top_k") if key in options}
            stops = [stop for stop in options["until"] if stop]
            params.append(SamplingParams(max_tokens=max_tokens, stop=stops, **known))
        texts = [answer.outputs[0].text for answer in self.llm.generate(prompts, params) if answer]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports] (optional)

    cli_evaluate()
