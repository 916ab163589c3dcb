"""A Roundtable model behind the harness's model interface. Imports the harness, so import it only where needed."""

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
    """The harness's model interface: tokenizes its requests, and answers them by ``score`` and ``generate``.

    Text is tokenized as in the harness's own class for transformers' models: with the tokenizer's special tokens, with
    spaces at a context's end moved to the continuation, and with the two tokenized together. An empty context is
    replaced by BOS, or EOS where there is no BOS. ``begin`` is the BOS of data.add_bos, which is put before every
    context whatever the tokenizer does. ``max_length`` is the longest input in tokens: longer ones lose their first
    tokens, and ``n_cut`` counts such requests.
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
        """The name that the harness would use for caches of requests, which Roundtable does not use."""
        return "roundtable"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The text's tokens. Special tokens are added unless ``add_special_tokens`` says not to.

        With None they are added, unless the text already begins with BOS; then ``begin`` is put first, too.
        """
        ids = self._encode(string, add_special_tokens)
        return after_bos(ids, self.begin) if add_special_tokens is None else ids

    def _encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        with making_tokens("a task"):
            return self.tokenizer.encode(string, add_special_tokens=add_special_tokens, verbose=False)

    def windows_of(self, request: Instance) -> list[Window]:
        """The windows to score for a request: one, or several for a long text in loglikelihood_rolling.

        Raises UserError where there is nothing to score, or a continuation is longer than ``max_length``.
        """
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
            context_ids = context_ids or [self.prefix_token_id]  # a context of spaces, all moved to the continuation
        if not continuation_ids:
            raise unanswerable(request, "has an empty continuation, so nothing is predicted", "leave it out")
        n_tokens = len(continuation_ids)
        if n_tokens > self.max_length:
            rule = f"has a continuation of {n_tokens} tokens, and the model sees {self.max_length} at once"
            raise unanswerable(request, rule, "shorten it, or score it as loglikelihood_rolling")
        self.n_cut += len(context_ids) + n_tokens > self.max_length + 1
        return [window_of(context_ids, continuation_ids, self.max_length)]

    def answered(self, requests: Sequence[Instance]) -> list[list[Answer]]:
        """The answers of each request, one for each of its windows, in order."""
        windows = [self.windows_of(request) for request in requests]
        found = iter(self.score([window for own in windows for window in own]))
        return [[next(found) for _ in own] for own in windows]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Each continuation's log-likelihood in nats, and whether greedy decoding would give it."""
        return [(answer.loglikelihood, answer.is_greedy) for (answer,) in self.answered(requests)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The texts' log-likelihoods, in nats."""
        return [sum(answer.loglikelihood for answer in own) for own in self.answered(requests)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The texts generated after the contexts, up to a stop string, greedily unless the task says otherwise."""
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
        """Log-likelihoods of requests that are tokenized already, a method that ``TemplateLM`` requires."""
        windows = [window_of(context, continuation, self.max_length) for _, context, continuation in requests]
        return [(answer.loglikelihood, answer.is_greedy) for answer in self.score(windows)]


def answer_of(request: Instance, own: Sequence[Answer]) -> Any:
    """The harness's answer to a request from its windows' answers: a sum in nats, or (nats, is greedy)."""
    if request.request_type == "loglikelihood_rolling":
        return sum(answer.loglikelihood for answer in own)
    (answer,) = own
    return answer.loglikelihood, answer.is_greedy


def unanswerable(request: Instance, rule: str, remedy: str) -> UserError:
    """The UserError for a request that no model can answer, naming its task and document."""
    return UserError([f"task {request.task_name}: document {request.doc_id} {rule}; {remedy}"])
