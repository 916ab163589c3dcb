"""A Roundtable model as the harness sees models. Imports the harness, so it is imported where that is needed alone."""

from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from data.tokenizer import after_bos, making_tokens
from launcher.errors import UserError
from launcher.tasks.generation import Wanted, wanted_of
from launcher.tasks.score import Answer
from launcher.tasks.windows import Window, rolling_windows, window_of

Score = Callable[[Sequence[Window]], list[Answer]]
Generate = Callable[[Sequence[tuple[list[int], Wanted]]], list[str]]


class RoundtableLM(TemplateLM):
    """What the harness asks of a model, answered by ``score`` and ``generate``: how tokens are made of a request.

    Text is tokenized as the harness's own class for transformers' models does it: with the special tokens that the
    tokenizer sets, a context's spaces at its end moved to the continuation, and the two tokenized together. Where a
    context is empty, BOS stands for it, or EOS where there is no BOS. ``begin`` is the BOS of data.add_bos: it stands
    before every context, whatever the tokenizer sets. ``max_length`` is the longest input: of longer ones the first
    tokens are left out, and ``n_cut`` counts them.
    """

    def __init__(
        self, tokenizer: Any, max_length: int, score: Score, generate: Generate | None = None, begin: int | None = None
    ) -> None:
        super().__init__()
        self.tokenizer, self.max_length = tokenizer, max_length
        self.score, self.generate = score, generate
        self.begin = begin
        self.n_cut = 0

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """A name for caches of requests, which are not used here."""
        return "roundtable"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The text's tokens. Special ones are added unless told otherwise, or the text begins with BOS already."""
        ids = self._encode(string, add_special_tokens)
        return after_bos(ids, self.begin) if add_special_tokens is None else ids

    def _encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        with making_tokens("a task"):
            return self.tokenizer.encode(string, add_special_tokens=add_special_tokens, verbose=False)

    def windows_of(self, request: Instance) -> list[Window]:
        """What is scored to answer a request. Raises UserError where nothing is, or a continuation is too long."""
        if request.request_type == "loglikelihood_rolling":
            (text,) = request.arguments
            tokens = self._encode(text)  # the first one is predicted after BOS anyhow
            if not tokens:
                raise unanswerable(request, "has an empty text, of which nothing can be predicted", "leave it out")
            return list(rolling_windows(tokens, self.prefix_token_id, self.max_length))
        context, continuation = request.arguments
        if context == "":
            tokens = self.tok_encode(continuation, add_special_tokens=False)
            before = [] if tokens[:1] == [self.prefix_token_id] else [self.prefix_token_id]
            context_ids, continuation_ids = [*before, *tokens][:1], [*before, *tokens][1:]
        else:
            context_ids, continuation_ids = self._encode_pair(context, continuation)
            context_ids = context_ids or [self.prefix_token_id]  # of spaces alone, which the continuation has now
        if not continuation_ids:
            raise unanswerable(request, "has an empty continuation, so nothing is predicted", "leave it out")
        n_tokens = len(continuation_ids)
        if n_tokens > self.max_length:
            rule = f"has a continuation of {n_tokens} tokens, and the model sees {self.max_length} at once"
            raise unanswerable(request, rule, "shorten it, or score it as loglikelihood_rolling")
        self.n_cut += len(context_ids) + n_tokens > self.max_length + 1
        return [window_of(context_ids, continuation_ids, self.max_length)]

    def answered(self, requests: Sequence[Instance]) -> list[list[Answer]]:
        """Each request's answers, window by window."""
        windows = [self.windows_of(request) for request in requests]
        found = iter(self.score([window for own in windows for window in own]))
        return [[next(found) for _ in own] for own in windows]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The continuations' log-likelihoods, in nats, and whether each is what greedy decoding gives."""
        return [(answer.loglikelihood, answer.is_greedy) for (answer,) in self.answered(requests)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The texts' log-likelihoods, in nats."""
        return [sum(answer.loglikelihood for answer in own) for own in self.answered(requests)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What follows the contexts, up to a text that ends it, greedily unless the task says otherwise."""
        assert self.generate is not None, "generation is refused where there is no way to generate"
        wanted = []
        for request in requests:
            context, options = request.arguments
            each = wanted_of(options, self.tokenizer.decode(self.eot_token_id), self.max_length, request)
            room = self.max_length - each.max_new_tokens
            ids = self.tok_encode(context) or [self.prefix_token_id]
            self.n_cut += len(ids) > room
            wanted.append((ids[-room:], each))
        return self.generate(wanted)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """What ``TemplateLM`` asks of its kinds: tokens instead of requests."""
        windows = [window_of(context, continuation, self.max_length) for _, context, continuation in requests]
        return [(answer.loglikelihood, answer.is_greedy) for answer in self.score(windows)]


def answer_of(request: Instance, own: Sequence[Answer]) -> Any:
    """What the harness is told for a request, of its windows' answers."""
    if request.request_type == "loglikelihood_rolling":
        return sum(answer.loglikelihood for answer in own)
    (answer,) = own
    return answer.loglikelihood, answer.is_greedy


def unanswerable(request: Instance, rule: str, remedy: str) -> UserError:
    """The error of a request that no model can answer."""
    return UserError([f"task {request.task_name}: document {request.doc_id} {rule}; {remedy}"])
