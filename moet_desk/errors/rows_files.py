"""Errors of the catalogue: memory, cards, drives, sources and packs.

Data alone; see `moet_desk.errors`.
"""

from __future__ import annotations

from moet_desk.errors.kinds import ErrorSpec, ExitCode, Reaction

_JOB = Reaction.JOB
_ENGINE = Reaction.ENGINE
_DAMAGED = Reaction.DAMAGED

MEMORY_AND_FILES: tuple[ErrorSpec, ...] = (
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
        "MD-GPU-11",
        "The graphics card ran out of memory",
        "There was no room for {what}. Experts gave some back, as far as they could.",
        "Ask again. If it comes back, close other programs that use the card, or lower"
        " memory.context or memory.vram_limit and load the model again.",
        exit=ExitCode.NO_ROOM,
        http=503,
    ),
    ErrorSpec(
        "MD-GPU-12",
        "The graphics card stopped working",
        "{reason}. After that nothing of this program can use the card.",
        "Start moet-desk again. If it comes back, look into the driver's log (dmesg), check the"
        " card's heat and power, or set engine.device to cpu.",
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
)
