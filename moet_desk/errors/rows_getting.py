"""Errors of the catalogue: known models, the hub, pulls, jobs, plans, settings and the terminal.

Data alone; see `moet_desk.errors`.
"""

from __future__ import annotations

from moet_desk.errors.kinds import ErrorSpec, ExitCode, Reaction, Severity

_JOB = Reaction.JOB

GETTING: tuple[ErrorSpec, ...] = (
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
)
