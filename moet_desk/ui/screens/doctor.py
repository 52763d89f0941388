"""The Doctor screen: what is checked on this computer, why it matters, and what to do.

The findings come from the function behind `moet-desk doctor`; they are looked for in a thread when
the screen is first opened and on R; measuring and putting in order are threads too. UI thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from moet_desk.errors import MoetError
from moet_desk.telemetry import EngineSnapshot
from moet_desk.ui.background import Background
from moet_desk.ui.clock import Clock
from moet_desk.ui.desk import Desk, DoctorView, Finding, JobView, Mark
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.frame import SmallWindow, TabLine
from moet_desk.ui.widgets.gauges import StatusLine, spread
from moet_desk.ui.widgets.job_lines import JobLines
from moet_desk.ui.widgets.key_line import KeyLine
from moet_desk.ui.widgets.problem import problem_content
from moet_desk.ui.widgets.setup_pages import mark_glyph, marked, rows, wrapped


class DoctorScreen(Screen[None]):
    """See the module's paragraph. `show` is called by the app's gauge timer."""

    DEFAULT_CSS = """
    DoctorScreen #count { height: 2; }
    DoctorScreen #ward { height: 1fr; }
    DoctorScreen #findings { height: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "again", "Again", id="doctor.again"),
        Binding("b", "measure", "Measure", id="doctor.measure"),
        Binding("f", "fix", "Tidy", id="doctor.fix"),
        Binding("c", "copy", "Copy", id="doctor.copy"),
        Binding("s", "save", "Save", id="doctor.save"),
        Binding("escape", "app.go('chat')", "Chat", id="doctor.back"),
    ]

    def __init__(self, desk: Desk, glyphs: Glyphs, *, clock: Clock, plain: bool) -> None:
        super().__init__()
        self._desk = desk
        self._glyphs = glyphs
        self._clock = clock
        self._plain = plain
        self._checking: Background[DoctorView] | None = None
        self._fixing: Background[tuple[str, ...]] | None = None
        self._doing = ""  # words while a thread works
        self._since_s = 0.0
        self._when: datetime | None = None
        self.view: DoctorView | None = None
        self.problem: MoetError | None = None
        self._drawn_once = False

    def compose(self) -> ComposeResult:
        yield TabLine("doctor", plain=self._plain)
        yield Static("", id="count", markup=False)
        with VerticalScroll(id="ward"):
            yield Static("", id="findings", markup=False)
        yield JobLines(self._glyphs)
        yield StatusLine(self._glyphs)
        yield KeyLine()
        yield SmallWindow(self._glyphs)

    def on_mount(self) -> None:
        self._drawn_once = True
        self.query_one("#ward").focus()
        self.action_again()

    @property
    def searching(self) -> bool:
        """Whether checks still go on."""
        return self._checking is not None or self._fixing is not None

    # -- what is shown ---------------------------------------------------------------------------

    def show(
        self, snapshot: EngineSnapshot, *, context_used: int, notes: tuple[str, ...],
        jobs: Sequence[JobView],
    ) -> None:  # fmt: skip
        """Draw what is known; called four times a second while in front."""
        if not self._drawn_once:
            return
        self.query_one(StatusLine).show(snapshot, context_used=context_used, notes=notes)
        self.query_one(JobLines).show(jobs)
        checking = self._checking
        if checking is not None and checking.ended:
            self._checking, self._when = None, self._clock.wall()
            self.view, self.problem = checking.result, checking.error
        self._take_fixed()
        self._draw()

    def _take_fixed(self) -> None:
        fixing = self._fixing
        if fixing is None or not fixing.ended:
            return
        self._fixing = None
        if fixing.error is not None:
            self.problem = fixing.error
            return
        words = "\n".join(fixing.result or ()) or "There was nothing to put in order."
        self.notify(words, title="Put in order", markup=False, timeout=10)
        self.action_again()

    def _draw(self) -> None:
        width = self.size.width
        self._set("count", self._count_line(width))
        if self.problem is not None:
            self._set("findings", problem_content(self.problem, self._glyphs))
        elif self.view is not None:
            self._set("findings", findings_content(self.view.findings, self._glyphs, width))

    def _count_line(self, width: int) -> Content:
        left = Content.styled(" Doctor", "bold")
        if self.searching:
            seconds = self._clock.monotonic() - self._since_s
            return spread(left, Content(f"{self._doing}, {seconds:.0f} s "), width)
        if self.view is None or self._when is None:
            return left
        words = f"{count_words(self.view.findings)}      {self._when:%H:%M:%S} "
        return spread(left, Content(words), width)

    def _set(self, name: str, content: Content) -> None:
        static = self.query_one(f"#{name}", Static)
        if static.content != content:
            static.update(content)

    # -- actions ---------------------------------------------------------------------------------

    def action_again(self) -> None:
        if not self.searching:
            self._begin("checking this computer")
            self._checking = Background(self._desk.doctor, name="doctor")
            self._draw()

    def action_measure(self) -> None:
        """Measure RAM, drive and card; they are used for forecasts from then on."""
        if not self.searching:
            self._begin("measuring this computer")
            call = partial(self._desk.measure, self._say_measured)
            self._checking = Background(call, name="measure")
            self._draw()

    def _say_measured(self, what: str) -> None:
        """Called in the measuring thread."""
        self._doing = f"measuring {clean_line(what, 40)}"

    def action_fix(self) -> None:
        """Put in order what needs no question, then check again."""
        if not self.searching:
            self._begin("putting folders and files in order")
            self._fixing = Background(self._desk.put_in_order, name="put-in-order")
            self._draw()

    def _begin(self, words: str) -> None:
        self._doing, self._since_s = words, self._clock.monotonic()

    def action_copy(self) -> None:
        if self.view is None:
            self.notify("There is nothing to copy yet.", severity="warning")
            return
        self.app.copy_to_clipboard(findings_text(self.view.findings, self._glyphs))
        self.notify("The findings are on the clipboard, if the terminal allows it.")

    def action_save(self) -> None:
        if self.view is None:
            self.notify("There is nothing to save yet.", severity="warning")
            return
        try:
            path = self._desk.save_report(self.view)
        except MoetError as error:
            self.notify(f"{error.cause}\n{error.do}", title=error.title, severity="error",
                        markup=False, timeout=10)  # fmt: skip
            return
        self.notify(f"Saved as {path}", markup=False, timeout=10)


def count_words(findings: Sequence[Finding]) -> str:
    """How many checks went how: "9 ok, 1 warning, 1 problem"."""
    counted = {mark: sum(f.mark is mark for f in findings) for mark in Mark}
    parts = [f"{counted[Mark.OK]} ok"]
    names = ((Mark.WARN, "warning"), (Mark.BAD, "problem"), (Mark.NOTE, "note"))
    parts += [f"{counted[m]} {word}{'s' * (counted[m] != 1)}" for m, word in names if counted[m]]
    parts += [f"{counted[Mark.UNKNOWN]} not checked"] if counted[Mark.UNKNOWN] else []
    return ", ".join(parts)


def findings_content(findings: Sequence[Finding], glyphs: Glyphs, width: int) -> Content:
    """All findings in their order; what is in order takes one row."""
    lines: list[Content] = []
    for finding in findings:
        title = clean_line(finding.title, width - 26)
        head = Content.assemble(" ", marked(finding.mark, glyphs), " ")
        head += Content.styled(title, "" if finding.mark is Mark.OK else "bold")
        right = Content.styled(f"{finding.code:<14}{finding.effect:<6} ", "$dim")
        lines.append(spread(head, right, width) if finding.code else head)
        lines += wrapped(finding.cause, width, 3) if finding.cause else []
        lines += wrapped(f"Do: {finding.fix}", width, 3) if finding.fix else []
    return rows(lines)


def findings_text(findings: Sequence[Finding], glyphs: Glyphs) -> str:
    """The findings as plain text, for the clipboard."""
    lines = []
    for f in findings:
        lines.append(" ".join(filter(None, (mark_glyph(f.mark, glyphs), f.code, f.title))))
        lines += [f"  {f.cause}"] if f.cause else []
        lines += [f"  Do: {f.fix}"] if f.fix else []
    return "\n".join(lines)
