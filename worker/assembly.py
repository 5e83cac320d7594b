"""Builds the parts of a worker from its settings.

Covers loading the model and fitting arena, page table, tokenizer and engine to it. Does not cover
sockets and threads (`pie.worker.service`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pie.index.contract import IndexWriter, PlaceRecord
from pie.page.events import Epoch, PlaceId, PlaceKind, Tier
from pie.policies.manager import RetentionManager
from pie.policies.retention import RetentionPolicy
from pie.tokens.errors import TokenizerError
from pie.tokens.template import ChatTemplate
from pie.tokens.tokenizer import Tokenizer
from pie.wire.programs import ModelFacts
from pie.worker.arena import Arena
from pie.worker.budget import split_budget
from pie.worker.engine import Engine, EngineLimits
from pie.worker.errors import UnsupportedModel
from pie.worker.generation import Vocabulary
from pie.worker.grammar import GrammarCompiler
from pie.worker.grammar_queue import GrammarQueue
from pie.worker.lower_tiers import LowerTiers, open_tiers
from pie.worker.model import Model, load_model
from pie.worker.page_copies import PageCopies
from pie.worker.page_table import Change, PageTable
from pie.worker.programs.calls import ModelShape
from pie.worker.programs.commands import ProgramCommand
from pie.worker.programs.host import ProgramHost
from pie.worker.programs.lane import ProgramLane
from pie.worker.programs.ledger import PageLedger, StateLedger
from pie.worker.programs.parking import ParkingLot
from pie.worker.programs.roster import Roster
from pie.worker.programs.tools import Tool, Toolbox, load_tools
from pie.worker.runner import Runner
from pie.worker.scheduler import Limits
from pie.worker.settings import ModelSettings, ProgramSettings
from pie.worker.sources import Progress
from pie.worker.state_table import StateTable
from pie.worker.suspended import suspended_budget

log = logging.getLogger("pie.worker.assembly")


@dataclass(frozen=True, slots=True)
class Assembly:
    """A model and what runs it."""

    model: Model
    tokenizer: Tokenizer
    arena: Arena
    context_tokens: int
    """Most tokens of one sequence: what the model allows and the arena holds."""


def assemble(settings: ModelSettings, progress: Progress) -> Assembly:
    """Load the model and allocate its pages. Takes seconds to minutes.

    Raises:
        WorkerError: The model cannot be had or served.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    model = load_model(settings, progress=progress)
    try:
        tokenizer = Tokenizer.load(model.folder)
    except TokenizerError as error:
        raise UnsupportedModel(str(error)) from error
    shares = split_budget(
        model.layout,
        settings.device_kv_budget,
        state_share=settings.state_share,
        max_running=settings.max_running,
    )
    arena = Arena(model.layout, shares.pages, model.device, state_slots=shares.state_slots)
    context_tokens = model.context_tokens
    if model.layout.attention_parts:
        context_tokens = min(context_tokens, arena.num_pages * settings.page_tokens)
    if context_tokens < model.context_tokens:
        log.warning(
            "device_kv_budget holds %d tokens, fewer than the %d that the model may have: longer "
            "requests are refused",
            context_tokens,
            model.context_tokens,
        )
    return Assembly(
        model=model,
        tokenizer=tokenizer,
        arena=arena,
        context_tokens=context_tokens,
    )


def make_engine(
    assembly: Assembly,
    settings: ModelSettings,
    new_retention: Callable[[], RetentionPolicy],
    on_changes: Callable[[list[Change]], None],
    *,
    debug: bool,
) -> Engine:
    """Return an engine over an assembled model.

    Args:
        assembly: The model and its memory.
        settings: What the engine keeps to.
        new_retention: Makes a policy that chooses victims: one for pages, one for snapshots.
        on_changes: See `Engine`.
        debug: See `Engine`.
    """
    model, arena = assembly.model, assembly.arena
    table = PageTable(
        total=arena.num_pages,
        page_bytes=arena.page_bytes,
        part=model.layout.parts[0],
        retention=RetentionManager(new_retention(), name="device"),
        model_root=model.model_root,
        page_tokens=model.layout.page_tokens,
    )
    states = None
    if model.states:
        states = StateTable(
            arena.state_slots,
            state_bytes=model.layout.state_bytes,
            stride_pages=-(-settings.state_stride_tokens // settings.page_tokens),
            retention=RetentionManager(new_retention(), name="device states"),
            model_root=model.model_root,
            page_tokens=model.layout.page_tokens,
        )
    vocabulary = Vocabulary(
        tokenizer=assembly.tokenizer,
        eos_token_ids=frozenset(assembly.tokenizer.eos_token_ids),
        context_tokens=assembly.context_tokens,
    )
    engine = Engine(
        Runner(model, arena),
        table,
        model.model_root,
        page_tokens=settings.page_tokens,
        vocabulary=vocabulary,
        limits=EngineLimits(
            scheduler=Limits(
                max_running=settings.max_running,
                max_waiting=settings.max_waiting,
                step_tokens=max(settings.step_tokens, settings.max_running),
            ),
            step_target_s=settings.step_target_ms / 1e3,
            store_queue_pages=settings.store_queue_pages,
        ),
        memory=arena,
        on_changes=on_changes,
        states=states,
        debug=debug,
    )
    share = settings.program_share
    ledger = PageLedger(table, int(table.total * share))
    states_of_programs = None
    if states is not None:
        # Two are left for a request that goes on from a snapshot; one at least is had by programs.
        most = min(int(states.total * share), states.total - 2)
        states_of_programs = StateLedger(states, max(1, most))
    roster = Roster(
        ledger,
        model.model_root,
        arena,
        shape_of(model, assembly.context_tokens),
        ParkingLot(
            arena,
            model.layout.attention_parts,
            page_bytes=model.layout.page_bytes,
            budget_bytes=int(settings.program_host_budget),
            state_bytes=model.layout.state_bytes,
        ),
        page_tokens=settings.page_tokens,
        vocabulary=vocabulary,
        states=states_of_programs,
    )
    engine.run_programs(
        ProgramLane(roster, ledger, page_tokens=settings.page_tokens, max_rows=settings.max_running)
    )
    return engine


def make_grammars(assembly: Assembly) -> GrammarQueue:
    """Return what compiles grammars for an assembled model; whoever made it closes it."""
    compiler = GrammarCompiler(
        assembly.tokenizer,
        vocab_size=assembly.model.vocab_size,
        eos_token_ids=assembly.tokenizer.eos_token_ids,
    )
    return GrammarQueue(compiler)


def make_host(
    assembly: Assembly,
    settings: ProgramSettings,
    put: Callable[[ProgramCommand], None],
    grammars: GrammarQueue,
    tools: Sequence[Tool] | None = None,
) -> ProgramHost:
    """Return a host of programs for an engine over an assembled model.

    Args:
        assembly: The model and its memory.
        settings: What programs may take.
        put: Hands a command to the step thread.
        grammars: Compiles what programs want answers to match.
        tools: What programs may call, where that has been loaded; None loads what the settings name.

    Raises:
        WorkerError: A tool of theirs cannot be had.
    """
    model, shape = assembly.model, shape_of(assembly.model, assembly.context_tokens)
    facts = ModelFacts(
        name=model.name,
        vocab_size=shape.vocab_size,
        context_tokens=shape.context_tokens,
        page_tokens=model.layout.page_tokens,
        layers=shape.layers,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        hidden_size=shape.hidden_size,
        eos_token_ids=tuple(assembly.tokenizer.eos_token_ids),
    )
    template = ChatTemplate.load(model.folder)
    toolbox = Toolbox(load_tools(settings.tools) if tools is None else tools, settings)
    return ProgramHost(put, assembly.tokenizer, template, facts, settings, grammars, toolbox)


def shape_of(model: Model, context_tokens: int) -> ModelShape:
    """Return what programs may know of a model's layers."""
    config = model.module.config.get_text_config()
    return ModelShape(
        vocab_size=model.vocab_size,
        context_tokens=context_tokens,
        hidden_size=int(config.hidden_size),
        query_heads=max((spec.query_heads for spec in model.specs), default=0),
        kv_heads=max((spec.kv_heads for spec in model.specs), default=0),
        windows=tuple(spec.window for spec in model.specs),
        is_recurrent=bool(model.states),
    )


def make_record(
    assembly: Assembly,
    *,
    place: PlaceId,
    epoch: Epoch,
    address: str,
    ttl_s: float,
    tiers: Sequence[Tier] = (),
    takes_programs: bool = False,
) -> PlaceRecord:
    """Return what a worker says of itself in the index; `tiers` are those below device memory."""
    model = assembly.model
    return PlaceRecord(
        place=place,
        epoch=epoch,
        kind=PlaceKind.WORKER,
        address=address,
        model_root=model.model_root,
        model_name=model.name,
        dtype=model.layout.dtype,
        layout_id=model.layout.layout_id,
        page_tokens=model.layout.page_tokens,
        context_tokens=assembly.context_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=assembly.tokenizer.eos_token_ids,
        tokenizer_path=str(model.folder),
        tokenizer_digest=assembly.tokenizer.digest,
        window_tokens=model.layout.window_tokens,
        parts=tuple(int(part) for part in model.layout.parts),
        tiers=tuple(int(tier) for tier in (Tier.DEVICE, *tiers)),
        total_pages=assembly.arena.num_pages or assembly.arena.state_slots,
        page_bytes=model.layout.page_bytes or model.layout.state_bytes,
        takes_programs=takes_programs,
        ttl_s=ttl_s,
    )


def tiers_of(
    settings: ModelSettings,
    place: PlaceId,
    copies: PageCopies,
    *,
    secret: bytes | None,
    encryption_keys: Sequence[bytes],
    retention: Callable[[], RetentionPolicy],
    index: IndexWriter,
) -> LowerTiers | None:
    """Open the tiers below device memory; None where all are off. Blocks."""
    kept = suspended_budget(settings.host_kv_budget, copies.names.layout)
    return open_tiers(
        place,
        copies,
        host_bytes=int(settings.host_kv_budget) - kept,
        disk_bytes=int(settings.disk_kv_budget),
        disk_path=settings.disk_kv_path,
        keep_bad_pages=settings.keep_bad_pages,
        compression=settings.disk_compression,
        secret=secret,
        encryption_keys=encryption_keys,
        retention=retention,
        index=index,
    )
