"""The reading side of one answer: what has arrived, cleaned, told apart, counted. UI thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from moet_desk.engine.handle import Quality, RequestStream
from moet_desk.errors import MoetError
from moet_desk.errors.disk import unexpected
from moet_desk.marked_text import MarkedText, join
from moet_desk.telemetry import Event, Failed, Finished, PrefillProgress, TextDelta, Usage
from moet_desk.ui.text import Cleaner
from moet_desk.ui.thinking import Splitter

_LEAST_S = 0.15  # two events taken by one pull are microseconds apart


class LiveAnswer:
    """The reading side of one answer: collects what has arrived, cleans it, counts."""

    def __init__(
        self,
        stream: RequestStream,
        now_s: Callable[[], float],
        *,
        quality: Quality = Quality.FAST,
        log_dir: str = "",
    ) -> None:
        self.quality = quality
        self._stream = stream
        self._log_dir = log_dir
        self._now_s = now_s
        self._cleaner = Cleaner()
        self._splitter = Splitter(stream)
        self._pieces: list[MarkedText] = []
        self._thoughts: list[str] = []
        self.thought_tokens = 0
        self._thought_since_s: float | None = None
        self.thought_s: float | None = None  # how long it has reasoned, None: it did not
        self.started_s = now_s()
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._first_tokens = 0
        self.n_tokens = 0
        self.n_reran = 0
        self.rerun_s = 0.0
        self.prompt: PrefillProgress | None = None
        self.prompt_since_s = self.started_s
        self.finished: Finished | None = None
        self.usage: Usage | None = None
        self.error: MoetError | None = None

    @property
    def ended(self) -> bool:
        """Whether the last event has been taken."""
        return self.finished is not None or self.error is not None

    @property
    def text(self) -> MarkedText:
        """The whole clean text so far; marked is what came from tokens that were made again."""
        if len(self._pieces) > 1:
            self._pieces = [join(self._pieces)]
        return self._pieces[0] if self._pieces else MarkedText()

    @property
    def first_token_s(self) -> float | None:
        """Seconds from sending to the first text, None before it."""
        return None if self._first_s is None else self._first_s - self.started_s

    @property
    def silent_s(self) -> float:
        """Seconds since the newest text, 0 before the first."""
        return 0.0 if self._last_s is None else self._now_s() - self._last_s

    @property
    def tok_per_s(self) -> float | None:
        """Mean rate since the first text, None until it means something."""
        if self._first_s is None or self._last_s is None or self._last_s < self._first_s + _LEAST_S:
            return None
        return (self.n_tokens - self._first_tokens) / (self._last_s - self._first_s)

    @property
    def thought(self) -> str:
        """The whole clean reasoning so far."""
        if len(self._thoughts) > 1:
            self._thoughts = ["".join(self._thoughts)]
        return self._thoughts[0] if self._thoughts else ""

    def pull(self) -> tuple[str, MarkedText]:
        """Take what has arrived; returns the new clean reasoning and text."""
        thoughts: list[str] = []
        fresh: list[MarkedText] = []
        for event in self._take():
            match event:
                case TextDelta(text=piece, reran=reran):
                    clean = self._cleaner.feed_marked(MarkedText(piece, reran))
                    thought, text = self._splitter.feed(clean)
                    thoughts.append(thought)
                    fresh.append(text)
                    self._count(event, thinks=bool(thought))
                case PrefillProgress():
                    if self.prompt is None:
                        self.prompt_since_s = self._now_s()
                    self.prompt = event
                case Finished(usage=usage):
                    self.finished, self.usage = event, usage
                case Failed(error=error, usage=failed_usage):
                    self.usage = failed_usage
                    self.error = unexpected(error, log=self._log_dir)
        if self.ended:
            thought, text = self._splitter.finish()
            thoughts.append(thought)
            fresh.append(text)
        return self._keep("".join(thoughts), join(fresh))

    def _take(self) -> Iterable[Event]:
        """What has arrived. Pieces of text are one piece where nothing has to tell them apart."""
        events = self._stream.take()
        alike = self._first_s is not None and not self._splitter.has_tags
        return _joined(events) if alike else events

    def _keep(self, thought: str, text: MarkedText) -> tuple[str, MarkedText]:
        if thought:
            self._thoughts.append(thought)
        if text:
            self._pieces.append(text)
        return thought, text

    def _count(self, event: TextDelta, *, thinks: bool) -> None:
        now_s = self._now_s()
        if thinks:
            self._thought_since_s = (
                now_s if self._thought_since_s is None else self._thought_since_s
            )
            self.thought_s = now_s - self._thought_since_s
            self.thought_tokens += event.n_tokens
        if self._first_s is None:
            self._first_s = now_s
            self._first_tokens = event.n_tokens
        self._last_s = now_s
        self.n_tokens += event.n_tokens
        self.n_reran += event.n_reran
        self.rerun_s += event.rerun_s

    def stop(self) -> None:
        """Ask the engine to stop; the text so far stays."""
        self._stream.cancel()


def _joined(events: Sequence[Event]) -> Iterator[Event]:
    """Events in their order; neighbouring pieces of text without marks become one."""
    texts: list[str] = []
    n_tokens, n_reran, rerun_s = 0, 0, 0.0
    for event in events:
        if isinstance(event, TextDelta) and not event.reran:
            texts.append(event.text)
            n_tokens += event.n_tokens
            n_reran += event.n_reran
            rerun_s += event.rerun_s
            continue
        if texts:
            yield TextDelta("".join(texts), n_tokens=n_tokens, n_reran=n_reran, rerun_s=rerun_s)
            texts, n_tokens, n_reran, rerun_s = [], 0, 0, 0.0
        yield event
    if texts:
        yield TextDelta("".join(texts), n_tokens=n_tokens, n_reran=n_reran, rerun_s=rerun_s)
