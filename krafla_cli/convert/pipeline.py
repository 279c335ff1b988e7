"""The conversion from start to end: everything that can be refused first, then one tensor at a time."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from krafla_cli.convert import companions
from krafla_cli.convert.checkpoint import Checkpoint, open_checkpoint
from krafla_cli.convert.importance import Importance
from krafla_cli.convert.mix import Mix, choose_mix
from krafla_cli.convert.plan import Options, Plan
from krafla_cli.convert.stream import InWork, in_work
from krafla_cli.convert.tensors import Encoding, Quantizer, check_tied_head, encoding_of
from krafla_cli.convert.tokenizer_files import TokenizerFile
from krafla_cli.errors import FileError, UsageError
from krafla_cli.formats import mli
from krafla_cli.formats.atomic import Output, check_target, commit
from krafla_cli.formats.json_file import shown_json
from krafla_cli.formats.mlb import MATRIX_CLASS, Header
from krafla_cli.formats.mlb_file import MlbWriter
from krafla_cli.formats.sidecar import Sidecar, files_beside, sidecar_path
from krafla_cli.formats.text import counted, printable
from krafla_cli.kernels.cores import physical_cores
from krafla_cli.progress import SILENT, Progress
from krafla_cli.quant.errors import Errors
from krafla_cli.quant.q4_0 import Rule, as_rule

TOOL = "krafla-cli"


@dataclass(frozen=True)
class Result:
    """What a conversion wrote, or with ``dry_run`` would write.

    ``errors``: with ``measure``, those of each quantized tensor by name. ``requantized``: of each tensor that was
    copied block by block, the blocks that could not be (Q8_0 blocks with -128). ``mix``: how the classes in Q8_0 were
    chosen, where that was asked for. ``seconds`` counts everything, ``fsync_seconds`` the wait for the disk at the end.
    """

    output: Path
    sidecars: tuple[Path, ...]
    plan: Plan
    options: Options
    q4_rule: str
    n_bytes: int
    tokenizer: TokenizerFile | None
    sha256: str | None
    seconds: float
    fsync_seconds: float
    errors: Mapping[str, Errors]
    requantized: Mapping[str, int]
    mix: Mix | None = None

    @property
    def n_weights(self) -> int:
        """Weights of all tensors, as the checkpoint has them or padded."""
        return sum(t.spec.n_weights for t in self.plan.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Bits of the whole file for each weight."""
        return 8 * self.n_bytes / self.n_weights


def convert(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    options: Options | None = None,
    threads: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    measure: bool = False,
    progress: Progress = SILENT,
) -> Result:
    """Converts ``src``, a Hugging Face folder, a GGUF or an MLLM file, to the model ``out`` and its sidecars.

    Without ``out``: <name of src>-<wtype>.mlb in the current folder. All files appear complete or not at all, the .mlb
    last. ``config``: of an MLLM file, the folder with its config.json and tokenizer. ``threads``: of the quantizers
    (None: the physical cores). ``measure``: find the error of each matrix. Raises FileError, FormatError, ShapeError,
    UnsupportedError, DataError or UsageError; see ``errors.py``.

    >>> result = krafla_cli.convert("demo", "demo.mlb")
    >>> result.options.wtype, result.q4_rule, [path.name for path in result.sidecars]
    ('q4', 'fit', ['demo.json', 'demo.mlt'])
    """
    started = time.perf_counter()
    options = options or Options()
    _check_options(options)
    if options.target_bpw is not None:
        options = replace(options, wtype="q4")
    checkpoint = open_checkpoint(Path(src), Path(config) if config is not None else None)
    plan = checkpoint.plan(options)
    options = plan.options
    output = Path(out) if out is not None else Path(f"{checkpoint.name}-{options.wtype}.mlb")
    name_error = UsageError(f"-o {printable(str(output))!r}: a model's name ends with .mlb")
    if not output.name or output in files_beside(output):
        raise name_error
    if not dry_run:
        given = (Path(options.imatrix),) if options.imatrix is not None else ()
        for target in (output, *files_beside(output)):
            check_target(target, force, inputs=(*checkpoint.inputs, *given))
    if output.suffix != ".mlb":
        raise name_error
    if not dry_run:
        check_tied_head(plan, checkpoint.source)
    importance = None
    if options.imatrix is not None:
        title = printable(options.imatrix)
        importance = Importance(mli.read(options.imatrix), plan.header, title, progress)
    n_threads = threads or physical_cores()
    rule = as_rule(options.q4_rule or ("fit" if importance else plan.family.q4_rule))
    mix = None
    if options.target_bpw is not None:
        importance_of = importance.of if importance else lambda _spec: None
        mix = choose_mix(checkpoint, options, options.target_bpw, rule, importance_of, n_threads, progress)
        options = replace(options, q8_mask=mix.q8_mask)
        plan = checkpoint.plan(options)
    for remark in plan.remarks:
        progress.info(remark)
    tokenizer = checkpoint.tokenizer(plan.header.vocab, progress)
    _warn(checkpoint, plan, progress)
    job = _Job(checkpoint, plan, options, output, tokenizer, importance, rule, mix, n_threads, force, measure, progress)
    sha256, fsync_seconds = (None, 0.0) if dry_run else job.write()
    if job.requantized:
        n_blocks, n_matrices = sum(job.requantized.values()), len(job.requantized)
        blocks, matrices = counted(n_blocks, "Q8_0 block"), counted(n_matrices, "matrix", "matrices")
        progress.info(f"quantized anew: {blocks} in {matrices}, which held -128")
    return job.result(sha256, fsync_seconds, started)


def _warn(checkpoint: Checkpoint, plan: Plan, progress: Progress) -> None:
    """What was asked for, or stated, and has no effect."""
    vocab = plan.header.vocab
    stated = companions.stated_stop_ids(checkpoint.config, checkpoint.companions)
    beyond = sorted(i for i in stated if not 0 <= i < vocab)
    if beyond:
        progress.warn(f"eos_token_id {beyond[0]} is no id of the model, which has {vocab}; it is left out")
    for key, value in companions.unusable_sampling(checkpoint.companions).items():
        progress.warn(f"{key} of the generation config is {shown_json(value)}, which no sampler can do; it is left out")
    if plan.options.imatrix is not None and all(t.spec.encoding != "q4_0" for t in plan.tensors):
        progress.warn("--imatrix changes nothing: it weighs Q4_0 blocks, and all matrices are Q8_0")


def _check_options(options: Options) -> None:
    if options.imatrix is not None and options.q4_rule == "round":
        raise UsageError("--imatrix selects the rule fit; it cannot be combined with --q4-rule round")
    if options.q8_mask and options.wtype == "q8":
        raise UsageError("--q8-classes keeps classes of a q4 model in Q8_0; with --wtype q8 all are")
    if options.target_bpw is None:
        return
    if options.wtype == "q8" or options.q8_mask:
        raise UsageError("--target-bpw chooses the classes in Q8_0 of a q4 model; it goes without others and with q4")
    if not 0 < options.target_bpw < math.inf:
        raise UsageError(f"--target-bpw must be a number above 0, not {options.target_bpw:g}")


@dataclass(frozen=True)
class _Job:
    """One conversion that has been decided."""

    checkpoint: Checkpoint
    plan: Plan
    options: Options
    output: Path
    tokenizer: TokenizerFile | None
    importance: Importance | None
    rule: Rule
    mix: Mix | None
    n_threads: int
    force: bool
    measure: bool
    progress: Progress
    errors: dict[str, Errors] = field(default_factory=dict)
    requantized: dict[str, int] = field(default_factory=dict)

    def write(self) -> tuple[str, float]:
        """Writes all files under temporary names, then renames them: sidecars first, the model last.

        Returns the model's SHA-256, and the seconds that the disk took to have it.
        """
        with contextlib.ExitStack() as stack:
            model = _open_output(self.output, stack)
            sha256 = self._write_model(model)
            sidecars = [self._write_sidecar(stack, sha256)]
            if self.tokenizer is not None:
                path = self.output.with_suffix(self.tokenizer.suffix)
                sidecars.append(_write_small(path, self.tokenizer.data, stack))
            started = time.perf_counter()
            model.sync()
            fsync_seconds = time.perf_counter() - started
            commit([*sidecars, model], self.force, self._stale() if self.force else ())
        return sha256, fsync_seconds

    def _stale(self) -> tuple[Path, ...]:
        """An older model's tokenizer of the other kind, which would be found beside the new model."""
        if self.tokenizer is None:
            return ()
        kept = (self.output.with_suffix(self.tokenizer.suffix), sidecar_path(self.output))
        return tuple(path for path in files_beside(self.output) if path not in kept)

    def _write_model(self, output: Output) -> str:
        self.progress.start("converting", sum(t.spec.total_bytes for t in self.plan.tensors), "B")
        try:
            writer = MlbWriter(output.file, self.plan.header)
            with in_work(self._encodings(), self.n_threads) as tensors:
                for tensor in tensors:
                    self._write_tensor(writer, tensor)
            return writer.finish()
        except OSError as error:
            raise FileError(f"cannot write {printable(str(self.output))}: {error.strerror}") from error
        finally:
            self.progress.finish()

    def _encodings(self) -> Iterator[Encoding]:
        quantizer = Quantizer(bool(self.plan.header.scale_f16), self.rule, self.measure)
        for tensor in self.plan.tensors:
            importance = self.importance.of(tensor.spec) if self.importance else None
            yield encoding_of(tensor, self.checkpoint.source, quantizer, importance)

    def _write_tensor(self, writer: MlbWriter, tensor: InWork) -> None:
        encoding, spec = tensor.encoding, tensor.encoding.plan.spec
        writer.write(spec.name, *encoding.arrays, complete_rows=tensor.complete_rows())
        self.checkpoint.source.release(encoding.plan.source)
        if encoding.n_anew:
            self.requantized[spec.name] = encoding.n_anew
        if self.measure and spec.is_quantized:
            self.errors[spec.name] = tensor.errors
        self.progress.advance(spec.total_bytes)

    def _write_sidecar(self, stack: contextlib.ExitStack, sha256: str) -> Output:
        found = self.checkpoint.companions
        tokenizer = self.tokenizer.tokenizer if self.tokenizer else None
        sidecar = Sidecar(
            sha256=sha256,
            chat_template=found.chat_template,
            stop_ids=companions.stop_ids(self.checkpoint.config, found, tokenizer, self.plan.header.vocab),
            sampling=companions.sampling(found),
            special_tokens=companions.special_tokens(found),
            provenance=self._provenance(),
        )
        return _write_small(sidecar_path(self.output), sidecar.to_bytes(), stack)

    def _provenance(self) -> dict[str, Any]:
        return {
            "tool": f"{TOOL} {_tool_version()}",
            "source": self.checkpoint.name,
            "family": self.plan.family.name,
            "options": asdict(self.options) | {"q4_rule": self.rule},
            "encodings": class_encodings(self.plan),
            "config": dict(self.checkpoint.config.raw),
        }

    def result(self, sha256: str | None, fsync_seconds: float, started: float) -> Result:
        """The result of the job that began at ``started``."""
        last = self.plan.tensors[-1].spec
        sidecars = [sidecar_path(self.output)]
        if self.tokenizer is not None:
            sidecars.append(self.output.with_suffix(self.tokenizer.suffix))
        n_bytes = -(-last.end // 64) * 64
        return Result(
            output=self.output,
            sidecars=tuple(sidecars),
            plan=self.plan,
            options=self.options,
            q4_rule=self.rule,
            n_bytes=n_bytes,
            tokenizer=self.tokenizer,
            sha256=sha256,
            seconds=time.perf_counter() - started,
            fsync_seconds=fsync_seconds,
            errors=self.errors,
            requantized=self.requantized,
            mix=self.mix,
        )


def class_encodings(plan: Plan) -> Mapping[str, str]:
    """The encoding of each matrix class that the model has: {"tok_emb": "q4_0", "qk": ...}."""
    return {MATRIX_CLASS[t.spec.role]: t.spec.encoding for t in plan.tensors if t.spec.role in MATRIX_CLASS}


def header_summary(header: Header) -> dict[str, Any]:
    """The header's values for a JSON document."""
    return {k: v for k, v in header.values.items() if k != "magic"}


def _tool_version() -> str:
    from importlib.metadata import version

    return version(TOOL)


def _open_output(path: Path, stack: contextlib.ExitStack) -> Output:
    output = Output(path)
    stack.callback(output.discard)
    return output


def _write_small(path: Path, data: bytes, stack: contextlib.ExitStack) -> Output:
    output = _open_output(path, stack)
    try:
        output.file.write(data)
    except OSError as error:
        raise FileError(f"cannot write {printable(str(path))}: {error.strerror}") from error
    output.sync()
    return output
