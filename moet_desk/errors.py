"""Every error a person can meet: one table of words, exit codes and HTTP statuses, and the
exceptions.

The table is data. The command line, the screens, the endpoint and docs/reference/errors.md all
print the same record, so a failure reads the same wherever it shows. Facts (sizes, names, limits)
travel as keyword fields and are put into the words here; they are never baked into strings
elsewhere.

Imports nothing of ours and may be used from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any


class ExitCode(IntEnum):
    """What a command's exit status means (docs/reference/cli.md lists the same table)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNFIT = 4
    NO_ROOM = 5
    NETWORK = 6
    DAMAGED = 7
    BUSY = 8
    ENGINE = 9
    STRICT = 10
    TIMEOUT = 124
    INTERRUPTED = 130
    TERMINATED = 143


class Severity(Enum):
    """How much an error takes away from the user."""

    STOPS = "stops"
    LOWER = "lower"
    INFO = "info"


class Reaction(Enum):
    """Who has to act; each value has one exception class."""

    USER = "user"  # the person must choose or change something
    JOB = "job"  # a long job is paused and can be resumed
    CLIENT = "client"  # the request was wrong; the server is fine
    ENGINE = "engine"  # the engine failed a request or must restart
    DAMAGED = "damaged"  # stored data is not what it should be


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """One row of the catalogue.

    `cause` and `do` are format strings over the facts given when the error is raised.
    `safe` says what was kept. `http` is the endpoint's status for this error.
    """

    code: str
    title: str
    cause: str
    do: str
    safe: str = "Nothing on disk was changed."
    reaction: Reaction = Reaction.USER
    severity: Severity = Severity.STOPS
    exit: ExitCode = ExitCode.FAILED
    http: int = 500


class _Facts(dict[str, Any]):
    """Facts for `str.format_map`: a missing one prints as "?", so that reporting never fails."""

    def __missing__(self, key: str) -> str:
        return "?"


class MoetError(Exception):
    """A failure from the catalogue. Raise it through `fail(code, ...)`.

    Attributes:
        spec: the catalogue row.
        facts: the figures and names of this occurrence, JSON-ready.
    """

    def __init__(self, spec: ErrorSpec, facts: Mapping[str, Any]) -> None:
        self.spec = spec
        self.facts = dict(facts)
        super().__init__(f"{spec.code} {spec.title}: {self.cause}")

    @property
    def code(self) -> str:
        return self.spec.code

    @property
    def title(self) -> str:
        return self.spec.title.format_map(_Facts(self.facts))

    @property
    def cause(self) -> str:
        return self.spec.cause.format_map(_Facts(self.facts))

    @property
    def do(self) -> str:
        return self.spec.do.format_map(_Facts(self.facts))

    @property
    def safe(self) -> str:
        return self.spec.safe.format_map(_Facts(self.facts))

    def to_dict(self) -> dict[str, Any]:
        """The error as the `error` object of `--json` output."""
        words = {"code": self.code, "title": self.title, "cause": self.cause, "do": self.do}
        return {**words, "safe": self.safe, "severity": self.spec.severity.value, **self.facts}

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.spec, self.facts))


class NeedsUser(MoetError):
    """The person must choose or change something before this can go on."""


class JobPaused(MoetError):
    """A long job stopped; its journal is valid and it can be resumed."""


class ClientFault(MoetError):
    """A request was wrong (HTTP 4xx); the server is unharmed."""


class EngineFault(MoetError):
    """The engine could not finish a request; the next one may work."""


class Damaged(MoetError):
    """Stored data is not what its checksum or header says."""


_CLASS_OF_REACTION: dict[Reaction, type[MoetError]] = {
    Reaction.USER: NeedsUser,
    Reaction.JOB: JobPaused,
    Reaction.CLIENT: ClientFault,
    Reaction.ENGINE: EngineFault,
    Reaction.DAMAGED: Damaged,
}


def without_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of what led to it."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def fail(code: str, **facts: Any) -> MoetError:
    """Make the exception for a catalogue code; the caller raises it.

    Args:
        code: a key of `CATALOGUE`, e.g. "MD-DISK-01".
        facts: values for the row's format strings; they also travel in `to_dict`.

    Raises:
        KeyError: the code is not in the catalogue (a programmer's mistake).
    """
    spec = CATALOGUE[code]
    return _CLASS_OF_REACTION[spec.reaction](spec, facts)


_USER, _JOB, _CLIENT = Reaction.USER, Reaction.JOB, Reaction.CLIENT
_ENGINE, _DAMAGED = Reaction.ENGINE, Reaction.DAMAGED

_ROWS: tuple[ErrorSpec, ...] = (
    # memory and disk -------------------------------------------------------------------------
    ErrorSpec(
        "MD-RAM-01",
        "Not enough RAM for this plan",
        "The plan needs {need} of RAM and {have} is available.",
        "Lower memory.ram or the context, or close other programs.",
        exit=ExitCode.NO_ROOM,
        http=503,
    ),
    ErrorSpec(
        "MD-RAM-05",
        "The RAM limit is too small for a step",
        "A step of {shape} can need {need} of rows at once and --ram-limit is {have}.",
        "Raise --ram-limit; rows beyond it are read from the drive of the models.",
        exit=ExitCode.NO_ROOM,
        http=503,
    ),
    ErrorSpec(
        "MD-GPU-01",
        "No NVIDIA GPU found",
        "This needs a CUDA device: {reason}.",
        "Run it on a computer with an NVIDIA GPU and its driver; nvidia-smi must list it. Without"
        " one, engine.device auto or cpu uses the CPU.",
        exit=ExitCode.UNFIT,
        http=503,
    ),
    ErrorSpec(
        "MD-GPU-02",
        "The graphics card cannot be used",
        "{name}: {reason}.",
        "{fix}, or set engine.device to auto or cpu.",
        exit=ExitCode.UNFIT,
        http=503,
    ),
    ErrorSpec(
        "MD-GPU-05",
        "Not enough memory on the graphics card",
        "The plan needs {need} of VRAM and may use {have}.",
        "Lower the context or the slots, close other programs that use the card, or set"
        " engine.device to cpu.",
        exit=ExitCode.NO_ROOM,
        http=503,
    ),
    ErrorSpec(
        "MD-GPU-09",
        "Opportunistic answers are not made on a graphics card",
        "engine.opportunistic is on, but there a step computes all experts with one precision.",
        "Set engine.opportunistic to false, or engine.device to cpu.",
        exit=ExitCode.UNFIT,
        http=503,
    ),
    ErrorSpec(
        "MD-GPU-10",
        "This model does not run on a graphics card yet",
        "Layers of {model} have {part}, for which there are no kernels yet; a CPU computes them.",
        "Set engine.device to cpu, or give --device cpu.",
        exit=ExitCode.UNFIT,
        http=503,
    ),
    ErrorSpec(
        "MD-RAM-02",
        "Locking memory was refused",
        "The driver would not pin {want} for experts (error {status}); about {got} are pinned.",
        "Raise the limit for locked memory (ulimit -l), or lower memory.ram.",
        exit=ExitCode.NO_ROOM,
        http=503,
    ),
    ErrorSpec(
        "MD-NVME-04",
        "A read failed",
        "Reading row (layer {layer}, expert {expert}) of {path} failed: {reason}.",
        "Run: moet-desk verify {model} --repair --source SOURCE",
        safe="The request was stopped; nothing was changed.",
        reaction=_ENGINE,
        exit=ExitCode.DAMAGED,
        http=500,
    ),
    ErrorSpec(
        "MD-DISK-01",
        "Not enough disk space",
        "{what} needs {need} in {path} and {have} is free.",
        "Free {missing}, or choose another folder with --data-dir.",
        exit=ExitCode.NO_ROOM,
    ),
    ErrorSpec(
        "MD-DISK-02",
        "The disk became full",
        "Writing {path} stopped after {done}: no space left.",
        "Free some space, then run the same command again; it resumes.",
        safe="Finished rows are kept and will not be made again.",
        reaction=_JOB,
        exit=ExitCode.NO_ROOM,
    ),
    ErrorSpec(
        "MD-DISK-03",
        "No permission to write",
        "{path} cannot be written: {reason}.",
        "Change its permissions, or choose another folder with --data-dir.",
        exit=ExitCode.USAGE,
    ),
    # source files ----------------------------------------------------------------------------
    ErrorSpec(
        "MD-SRC-01",
        "No model in this folder",
        "{path} has no {missing}.",
        "Give the folder that holds config.json and the .safetensors files, or a .gguf file.",
        exit=ExitCode.NOT_FOUND,
    ),
    ErrorSpec(
        "MD-SRC-02",
        "A model file cannot be read",
        "{file}: {reason}.",
        "Download this file again.",
        reaction=_DAMAGED,
        exit=ExitCode.DAMAGED,
    ),
    ErrorSpec(
        "MD-SRC-03",
        "Parts of the model are missing",
        "{n_missing} of {n_total} tensors named by {index} are not there, first: {first}.",
        "Download the missing files: {files}.",
        reaction=_DAMAGED,
        exit=ExitCode.DAMAGED,
    ),
    ErrorSpec(
        "MD-SRC-04",
        "A tensor has the wrong shape",
        "{tensor} is {got}, the config asks for {want}.",
        "The files do not belong to this config.json; download both again.",
        reaction=_DAMAGED,
        exit=ExitCode.DAMAGED,
    ),
    ErrorSpec(
        "MD-SRC-05",
        "Unknown quantisation",
        "{tensor} is stored as {format}, which cannot be read.",
        "Use the BF16, FP8, MXFP4, NVFP4, int4 or GGUF files of this model.",
        exit=ExitCode.UNFIT,
    ),
    ErrorSpec(
        "MD-SRC-06",
        "A tensor holds invalid numbers",
        "{tensor} has {n_bad} NaN or infinite values in its {part}.",
        "The file is damaged; download it again.",
        reaction=_DAMAGED,
        exit=ExitCode.DAMAGED,
    ),
    ErrorSpec(
        "MD-SRC-07",
        "The config cannot be used",
        "{path}: {reason}.",
        "Use the model's own config.json, unchanged.",
        exit=ExitCode.UNFIT,
    ),
    ErrorSpec(
        "MD-SRC-08",
        "Tensors that this model should not have",
        "{n_unknown} tensors are not known to the family {family}, first: {first}.",
        "Use the model's own files, unchanged; this may be another variant of it.",
        exit=ExitCode.UNFIT,
    ),
    ErrorSpec(
        "MD-SRC-09",
        "Unknown quantisation",
        "{path} names {what} in its quantization_config, which is not known here and may change"
        " the numbers.",
        "Use the BF16, FP8, MXFP4, NVFP4, int4 or GGUF files of this model.",
        exit=ExitCode.UNFIT,
    ),
    # GGUF files ------------------------------------------------------------------------------
    ErrorSpec(
        "MD-GGUF-01",
        "Parts of the model are missing",
        "{n_missing} of {n_parts} files of this model are not there, first: {first}.",
        "Put all parts in one folder, under the names they were published with.",
        reaction=_DAMAGED,
        exit=ExitCode.DAMAGED,
    ),
    ErrorSpec(
        "MD-GGUF-02",
        "A dense model",
        "{file} holds a {arch} model without experts. This program keeps experts that are not"
        " needed out of fast memory, and a dense model needs all of itself for every token.",
        "Run it with llama.cpp or a program like it. Mixture-of-experts models:"
        " moet-desk ls --available",
        exit=ExitCode.UNFIT,
    ),
    ErrorSpec(
        "MD-GGUF-03",
        "Unknown architecture",
        '{file} has the architecture "{arch}". GGUF files can be read of: {supported}.',
        "Use the .safetensors files of this model, if docs/models.md says that it runs.",
        exit=ExitCode.UNFIT,
    ),
    ErrorSpec(
        "MD-GGUF-04",
        "The tokenizer cannot be converted",
        "{file}: {reason}.",
        "Put the file and the model's own tokenizer.json in a folder, and give that folder.",
        exit=ExitCode.UNFIT,
    ),
    ErrorSpec(
        "MD-GGUF-05",
        "The fields of the file cannot be used",
        "{file}: {reason}.",
        "Use another GGUF file of this model, made by a newer converter.",
        exit=ExitCode.UNFIT,
    ),
    ErrorSpec(
        "MD-GGUF-06",
        "Several models in this folder",
        "{path} holds {n_models} GGUF models: {first}.",
        "Give the file of the one that you want.",
        exit=ExitCode.USAGE,
    ),
    # packs -----------------------------------------------------------------------------------
    ErrorSpec(
        "MD-PACK-01",
        "Unsupported model family",
        'model_type "{model_type}" is not supported. Supported: {supported}.',
        "See docs/models.md for what runs today.",
        exit=ExitCode.UNFIT,
    ),
    ErrorSpec(
        "MD-PACK-03",
        "The pack has another format version",
        "{path} has format {got}, this program reads {want}.",
        "Pack it again from the source: moet-desk pack SOURCE --name {model}",
        reaction=_DAMAGED,
        exit=ExitCode.DAMAGED,
    ),
    ErrorSpec(
        "MD-PACK-04",
        "Damaged rows",
        "{n_bad} of {n_rows} rows of {model} do not match their checksum: {rows}.",
        "Run: moet-desk verify {model} --repair --source SOURCE",
        reaction=_DAMAGED,
        exit=ExitCode.DAMAGED,
    ),
    ErrorSpec(
        "MD-PACK-06",
        "The pack is not complete",
        "{path} has {done} of {total} rows.",
        "Run the command that began it (pack or pull) again; it resumes.",
        safe="Finished rows are kept.",
        reaction=_JOB,
        exit=ExitCode.DAMAGED,
    ),
    ErrorSpec(
        "MD-PACK-07",
        "The pack cannot be read",
        "{path}: {reason}.",
        "Run: moet-desk verify {model}   or pack it again from the source.",
        reaction=_DAMAGED,
        exit=ExitCode.DAMAGED,
    ),
    ErrorSpec(
        "MD-PACK-08",
        "This name is taken by another model",
        "{path} was packed from other files (identity {got}, this source is {want}).",
        "Choose another name with --name, or remove the old one: moet-desk rm {model}",
        exit=ExitCode.BUSY,
    ),
    ErrorSpec(
        "MD-PACK-09",
        "Another process is packing this model",
        "{path} is locked by process {pid}.",
        "Wait for it, or stop it.",
        exit=ExitCode.BUSY,
    ),
    ErrorSpec(
        "MD-PACK-10",
        "This source does not match the pack",
        "The files in {path} have identity {got}, the pack was made from {want}.",
        "Give the folder the pack was made from.",
        exit=ExitCode.DAMAGED,
    ),
    ErrorSpec(
        "MD-PACK-11",
        "There is nothing to repair it from",
        "{model} is damaged, was not fetched from a hub, and its source is not here.",
        "Name the folder it was made from: moet-desk verify {model} --repair --source FOLDER",
        exit=ExitCode.DAMAGED,
    ),
    ErrorSpec(
        "MD-LIB-01",
        "No such model",
        "{model} is not among the models in {path}.",
        "List them: moet-desk ls",
        exit=ExitCode.NOT_FOUND,
        http=404,
    ),
    ErrorSpec(
        "MD-CAT-01",
        "The list of known models cannot be read",
        "{path}: {reason}.",
        "It comes with the program: install moet-desk again.",
        exit=ExitCode.DAMAGED,
    ),
    ErrorSpec(
        "MD-CAT-02",
        "This model is not known",
        "{model} is not among the known models.",
        "List them: moet-desk ls --available",
        exit=ExitCode.NOT_FOUND,
    ),
    # downloads -------------------------------------------------------------------------------
    ErrorSpec(
        "MD-NET-01",
        "The network is gone",
        "{host} cannot be reached: {reason}. Tried {attempts} times.",
        "Check the connection, then run the same command again; it resumes.",
        safe="Everything fetched so far is kept.",
        reaction=_JOB,
        exit=ExitCode.NETWORK,
    ),
    ErrorSpec(
        "MD-NET-02",
        "The hub is busy or broken",
        "{host} answered {status}{wait}. Tried {attempts} times.",
        "Wait a while, then run the same command again; it resumes.",
        safe="Everything fetched so far is kept.",
        reaction=_JOB,
        exit=ExitCode.NETWORK,
    ),
    ErrorSpec(
        "MD-NET-03",
        "The connection cannot be trusted",
        "The certificate of {host} was refused: {reason}.",
        "Set this computer's clock; behind a company proxy, set SSL_CERT_FILE to its certificates.",
        reaction=_JOB,
        exit=ExitCode.NETWORK,
    ),
    ErrorSpec(
        "MD-HUB-01",
        "No such model on the hub, or it is private",
        "{host} has no {repo}{detail} that this computer may see.",
        "Check the name. If it is private, sign in: moet-desk login",
        exit=ExitCode.NOT_FOUND,
    ),
    ErrorSpec(
        "MD-HUB-02",
        "The hub wants your consent first",
        "{repo} may be fetched only by people who accepted its terms and are signed in.",
        "Accept the terms at {page}, sign in with: moet-desk login, then run this command again.",
        safe="Everything fetched so far is kept.",
        reaction=_JOB,
        exit=ExitCode.NETWORK,
    ),
    ErrorSpec(
        "MD-HUB-03",
        "The model changed on the hub",
        "{repo} was pinned to {want} when this download began, and the hub now has {got}.",
        "To start again from what is there now: moet-desk rm {model}, then pull it again.",
        safe="Everything fetched so far is kept.",
        reaction=_JOB,
        exit=ExitCode.NETWORK,
    ),
    ErrorSpec(
        "MD-HUB-04",
        "The hub's answer cannot be used",
        "{host}: {reason}.",
        "Try again later. If it stays so, check HF_ENDPOINT and proxies.",
        safe="Everything fetched so far is kept.",
        reaction=_JOB,
        exit=ExitCode.NETWORK,
    ),
    ErrorSpec(
        "MD-HUB-05",
        "The hub does not know this token",
        "{host} refused the token that was given; it is not kept.",
        "Make one that may read, at {page}, and give the whole of it.",
        exit=ExitCode.NETWORK,
    ),
    ErrorSpec(
        "MD-HUB-06",
        "Another token counts here",
        "HF_TOKEN is set in the environment, and counts before a token that is kept.",
        "Set HF_TOKEN to the new token, or start without it and sign in again.",
        exit=ExitCode.USAGE,
    ),
    ErrorSpec(
        "MD-PACK-02",
        "A file does not match its checksum",
        "{file} is not what the hub says it is: {reason}. Fetched {attempts} times.",
        "Run the same command again; it fetches this file ({size}) again and no other.",
        safe="All other files and finished rows are kept.",
        reaction=_JOB,
        exit=ExitCode.DAMAGED,
    ),
    ErrorSpec(
        "MD-PULL-01",
        "The download was paused",
        "{model}: {done} of {total} are fetched and {rows} of {n_rows} experts are packed.",
        "Run the same command again, or: moet-desk jobs resume pull-{model}",
        safe="Everything fetched and packed so far is kept.",
        reaction=_JOB,
        exit=ExitCode.INTERRUPTED,
    ),
    ErrorSpec(
        "MD-PULL-02",
        "This is a large download",
        "{model} is {size} to fetch, and {agreed}.",
        "Add {add}, or run it on a terminal and answer the question.",
        exit=ExitCode.USAGE,
    ),
    ErrorSpec(
        "MD-PULL-03",
        "This pack needs your word",
        "{model} takes {size} more of disk, and {agreed}.",
        "Add {add}, or run it on a terminal and answer the question.",
        exit=ExitCode.USAGE,
    ),
    ErrorSpec(
        "MD-JOB-01",
        "No such job",
        "{job} is not among the jobs in {path}.",
        "List them: moet-desk ps",
        exit=ExitCode.NOT_FOUND,
    ),
    ErrorSpec(
        "MD-JOB-02",
        "The job cannot do that now",
        "{job} is {state}.",
        "See its state: moet-desk ps",
        exit=ExitCode.BUSY,
    ),
    # planning --------------------------------------------------------------------------------
    ErrorSpec(
        "MD-PLAN-02",
        "The context does not fit",
        "{want} tokens asked for; at most {largest} fit.",
        "Set memory.context to {largest} or less.",
        exit=ExitCode.NO_ROOM,
        http=400,
    ),
    ErrorSpec(
        "MD-PLAN-03",
        "The expert pool is too small",
        "{want} slots asked for; one token needs at least {least}.",
        "Set memory.pool_slots to {least} or more.",
        exit=ExitCode.NO_ROOM,
    ),
    ErrorSpec(
        "MD-PLAN-04",
        "This model does not run here yet",
        "{model}: {reason}.",
        "See docs/models.md for what runs today, or: moet-desk ls --available",
        exit=ExitCode.UNFIT,
    ),
    ErrorSpec(
        "MD-PLAN-05",
        "This is no record of a computer",
        "{path}: {reason}.",
        "Make one with: moet-desk doctor --record FILE",
        exit=ExitCode.USAGE,
    ),
    # configuration ---------------------------------------------------------------------------
    ErrorSpec(
        "MD-CFG-01",
        "The settings file cannot be read",
        "{path}, {where}: {reason}.",
        "Correct the line, or remove the file to use the defaults.",
        exit=ExitCode.USAGE,
    ),
    ErrorSpec(
        "MD-CFG-02",
        "Unknown setting",
        '"{name}" in {source} is not a setting.{guess}',
        "List all settings: moet-desk config list",
        exit=ExitCode.USAGE,
    ),
    ErrorSpec(
        "MD-CFG-03",
        "A setting has a wrong value",
        "{name} = {value} in {source}: {reason}.",
        "Change it; the default is {default}.",
        exit=ExitCode.USAGE,
    ),
    # terminal --------------------------------------------------------------------------------
    ErrorSpec(
        "MD-TERM-01",
        "The window is too small",
        "moet-desk needs {want_columns} x {want_rows}, this is {columns} x {rows}.",
        'Make it larger, or use: moet-desk run "..." or moet-desk serve',
        safe="Answers go on; nothing is lost.",
        severity=Severity.LOWER,
        exit=ExitCode.OK,
    ),
    ErrorSpec(
        "MD-TERM-03",
        "No terminal",
        "The app needs a terminal, and {stream} is not one.",
        'Use: moet-desk run "your question"   or: moet-desk serve',
        exit=ExitCode.USAGE,
    ),
    ErrorSpec(
        "MD-TERM-04",
        "This terminal cannot draw screens",
        "The app moves the cursor, and a terminal of the type {term} cannot.",
        "Talk line by line instead: moet-desk run -i --plain",
        exit=ExitCode.USAGE,
    ),
    # process and engine ----------------------------------------------------------------------
    ErrorSpec(
        "MD-ENG-01",
        "Another moet-desk is running",
        "Process {pid} holds {path}.",
        "Use that one, stop it, or choose another folder with --data-dir.",
        exit=ExitCode.BUSY,
    ),
    ErrorSpec(
        "MD-ENG-03",
        "The engine stopped",
        "{reason}.",
        "Start moet-desk again. If it happens twice, report it with the log: {log}",
        safe="Chats and models are safe.",
        reaction=_ENGINE,
        exit=ExitCode.ENGINE,
        http=503,
    ),
    ErrorSpec(
        "MD-ENG-04",
        "The answer could not be finished",
        "{reason}.",
        "Try again. If it happens twice, run: moet-desk verify {model}",
        safe="The text so far is kept.",
        reaction=_ENGINE,
        exit=ExitCode.ENGINE,
    ),
    ErrorSpec(
        "MD-ENG-05",
        "This model cannot guess tokens ahead with a head of its own",
        "{model} has no MTP head: {reason}.",
        "Set engine.drafts to auto, lookup or off",
        reaction=_ENGINE,
        exit=ExitCode.ENGINE,
    ),
    ErrorSpec(
        "MD-ENG-06",
        "The engine is busy",
        "{n_waiting} requests are waiting, which is the limit.",
        "Try again in a moment.",
        reaction=_CLIENT,
        exit=ExitCode.BUSY,
        http=503,
    ),
    ErrorSpec(
        "MD-ENG-07",
        "No model is loaded",
        "The engine has no model{why}.",
        "Load one first.",
        reaction=_CLIENT,
        exit=ExitCode.NOT_FOUND,
        http=503,
    ),
    # endpoint --------------------------------------------------------------------------------
    ErrorSpec(
        "MD-API-01",
        "The port is in use",
        "{host}:{port} is taken by another program.",
        "Choose another: moet-desk serve --port {next_port}",
        exit=ExitCode.BUSY,
    ),
    ErrorSpec(
        "MD-API-02",
        "Unknown model",
        'There is no model "{model}" here. This server offers: {offered}.',
        "Use one of these names.",
        reaction=_CLIENT,
        http=404,
    ),
    ErrorSpec(
        "MD-API-03",
        "The prompt is longer than the context",
        "The prompt has {prompt_tokens} tokens; the context holds {context}"
        " and {reserve} are kept for the answer.",
        "Shorten the prompt, or set memory.context higher (this model allows {model_context}).",
        reaction=_CLIENT,
        exit=ExitCode.USAGE,
        http=400,
    ),
    ErrorSpec(
        "MD-API-04",
        "A parameter is not supported",
        "{parameter}: {reason}.",
        "Leave it out or change it.",
        reaction=_CLIENT,
        exit=ExitCode.USAGE,
        http=400,
    ),
    ErrorSpec(
        "MD-API-05",
        "The request cannot be read",
        "{reason}.",
        "Send a JSON body as the reference of this address's protocol has it.",
        reaction=_CLIENT,
        exit=ExitCode.USAGE,
        http=400,
    ),
    ErrorSpec(
        "MD-API-06",
        "Not allowed",
        "{reason}.",
        "{hint}",
        reaction=_CLIENT,
        exit=ExitCode.USAGE,
        http=401,
    ),
    ErrorSpec(
        "MD-API-07",
        "This host name is not served",
        'The Host header "{host}" is not this computer.',
        "Use http://127.0.0.1:{port}, or add the name to endpoint.hosts.",
        reaction=_CLIENT,
        http=403,
    ),
    ErrorSpec(
        "MD-API-08",
        "The request is too large",
        "The body is larger than {limit}.",
        "Send less.",
        reaction=_CLIENT,
        http=413,
    ),
    ErrorSpec(
        "MD-API-09",
        "Web pages from elsewhere are not served",
        'The request comes from a page of "{origin}".',
        "Call from a program, or add the page's origin to endpoint.cors.",
        reaction=_CLIENT,
        http=403,
    ),
    ErrorSpec(
        "MD-API-10",
        "No such address",
        "{address} is not served.",
        "The base address ends in /v1; try /v1/models.",
        reaction=_CLIENT,
        http=404,
    ),
    ErrorSpec(
        "MD-API-11",
        "No such response",
        "Response {response} is not kept here.",
        "Send the whole conversation as input. The oldest responses are dropped first.",
        reaction=_CLIENT,
        http=404,
    ),
    # another server ---------------------------------------------------------------------------
    ErrorSpec(
        "MD-CONN-01",
        "The server does not answer",
        "{address}: {reason}.",
        "Check the address and that the server runs, then try again.",
        safe="The text so far is kept.",
        exit=ExitCode.NETWORK,
        http=502,
    ),
    ErrorSpec(
        "MD-CONN-02",
        "The server wants another key",
        "{address} answered {status}: {reason}.",
        "Give it: moet-desk chat --connect {address} --ask-key, or set MOET_DESK_CONNECT_KEY.",
        safe="The text so far is kept.",
        exit=ExitCode.NETWORK,
        http=502,
    ),
    ErrorSpec(
        "MD-CONN-03",
        "The server's answer cannot be used",
        "{address}: {reason}.",
        "Check that it speaks OpenAI's protocol; its address mostly ends in /v1.",
        safe="The text so far is kept.",
        exit=ExitCode.NETWORK,
        http=502,
    ),
    ErrorSpec(
        "MD-CONN-04",
        "The server refused this",
        "{address} answered {status}: {reason}.",
        "Try again later, or change what is asked for.",
        safe="The text so far is kept.",
        exit=ExitCode.NETWORK,
        http=502,
    ),
    ErrorSpec(
        "MD-CONN-05",
        "The chat is longer than the server allows",
        "{address} answered {status}: {reason}.",
        "Forget the oldest turns, or begin a new chat.",
        safe="The text so far is kept.",
        exit=ExitCode.NETWORK,
        http=502,
    ),
    ErrorSpec(
        "MD-CONN-06",
        "Which model of the server?",
        "{address} offers {offered}.",
        "Name one with --model.",
        exit=ExitCode.NOT_FOUND,
    ),
    ErrorSpec(
        "MD-CONN-07",
        "Others can read the keys",
        "{path} may be read by other users of this computer.",
        "Run: chmod 600 {path}   and give servers new keys if others did read it.",
        exit=ExitCode.USAGE,
    ),
    ErrorSpec(
        "MD-CLI-01",
        "The command cannot be used like this",
        "{reason}.",
        "See: {command} --help",
        exit=ExitCode.USAGE,
    ),
    ErrorSpec(
        "MD-CLI-02",
        "The program cannot be started",
        "{program} was not found, or is no program.",
        "Install it, or name it in PATH.",
        exit=ExitCode.NOT_FOUND,
    ),
    ErrorSpec(
        "MD-CLI-03",
        "The endpoint does not answer",
        "Nothing answers at {address}.",
        "Open moet-desk, or use: moet-desk serve",
        safe="Nothing was started or written.",
        exit=ExitCode.NOT_FOUND,
    ),
    # measuring quality -----------------------------------------------------------------------
    ErrorSpec(
        "MD-EVAL-01",
        "The file cannot be read",
        "{path}: {reason}.",
        "Give a UTF-8 file: plain text, or one JSON object per line if its name ends in .jsonl.",
        exit=ExitCode.USAGE,
    ),
    ErrorSpec(
        "MD-EVAL-02",
        "A line of the file cannot be used",
        "{path}, line {line}: {reason}.",
        "Correct or remove that line. The formats are in docs/quality.md.",
        exit=ExitCode.USAGE,
    ),
    ErrorSpec(
        "MD-EVAL-03",
        "There is nothing to measure",
        "{path} holds {what}.",
        "Give a file with some text or tasks in it.",
        exit=ExitCode.USAGE,
    ),
    ErrorSpec(
        "MD-CHAT-01",
        "The chat template failed",
        "The model's own template refused the messages: {reason}.",
        "Check the order of roles in the messages.",
        reaction=_CLIENT,
        exit=ExitCode.USAGE,
        http=400,
    ),
    ErrorSpec(
        "MD-CHAT-02",
        "The chats cannot be opened",
        "{path}: {reason}.",
        "Move the file away to start with an empty history.",
        exit=ExitCode.DAMAGED,
        reaction=_DAMAGED,
    ),
    ErrorSpec(
        "MD-CHAT-03",
        "No such chat",
        "Chat {chat} is not in {path}.",
        "It may have been deleted; open another one.",
        exit=ExitCode.NOT_FOUND,
        http=404,
    ),
    ErrorSpec(
        "MD-CHAT-04",
        "This file cannot be attached",
        "{path}: {reason}.",
        "Attach a text file: notes, code, a table as CSV. Save other documents as text first.",
        exit=ExitCode.USAGE,
    ),
    ErrorSpec(
        "MD-CHAT-05",
        "This text is too large to attach",
        "{name} has {size}; at most {limit} can be attached.",
        "Attach the part that matters.",
        exit=ExitCode.USAGE,
    ),
    ErrorSpec(
        "MD-GRAM-01",
        "The form of this answer cannot be enforced",
        "{parameter}: {reason}.",
        "Change the schema or the grammar, or leave it out.",
        reaction=_CLIENT,
        exit=ExitCode.USAGE,
        http=400,
    ),
    ErrorSpec(
        "MD-GRAM-02",
        "The answer could not keep its form",
        "{reason}.",
        "Simplify the schema or the grammar.",
        safe="The text so far is kept.",
        reaction=_CLIENT,
        exit=ExitCode.ENGINE,
    ),
    ErrorSpec(
        "MD-TRACE-01",
        "There is no such recording",
        "{reason}: {path}.",
        "Give a file made with --record-trace, or one of: {names}.",
        exit=ExitCode.NOT_FOUND,
    ),
    ErrorSpec(
        "MD-TRACE-02",
        "The recording is damaged",
        "{path}: {reason}.",
        "Record it again, or fetch the file again.",
        reaction=_DAMAGED,
        exit=ExitCode.DAMAGED,
    ),
    ErrorSpec(
        "MD-TRACE-03",
        "The recording was made by another version",
        "{path} has version {version}; this program reads version {known}.",
        "Open it with the moet-desk that made it ({program}), or record it again.",
        exit=ExitCode.USAGE,
    ),
    ErrorSpec(
        "MD-TRACE-04",
        "A recording cannot answer",
        "What you see was recorded earlier; no model is loaded.",
        "Start moet-desk without --demo-trace to ask a model.",
        safe="What you wrote is still in the prompt.",
        http=503,
    ),
    ErrorSpec(
        "MD-TRACE-05",
        "The recording could not be written",
        "{path}: {reason}.",
        "Choose another file or free some space.",
        safe="The answer is not affected.",
    ),
    ErrorSpec(
        "MD-BUG-01",
        "Something went wrong inside moet-desk",
        "{reason}.",
        "Please report this with the log: {log}",
        safe="Chats and models are safe.",
    ),
)

CATALOGUE: dict[str, ErrorSpec] = {row.code: row for row in _ROWS}
