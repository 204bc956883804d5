# SPDX-License-Identifier: Apache-2.0
"""The backend as the host sees it: eligibility, construction per era, weights' hooks, forward, the operator."""

from __future__ import annotations

import gc
import importlib
import itertools
import re
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.fake_host.install import installed_host
from tests.helpers.golden import golden_layer
from tests.helpers.host_layer import (
    REL_L2,
    forward,
    load,
    logits_of,
    make_moe,
    model_config,
    oracle_of,
    run_context,
)
from trtllm_megamoe.comm import run_threads
from trtllm_megamoe.errors import (
    MegaMoeCapacityError,
    MegaMoeConfigError,
    MegaMoeRankDivergenceError,
    MegaMoeStateError,
    MegaMoeUnavailableError,
    MegaMoeWeightError,
)
from trtllm_megamoe.formats import ActivationMode, CombineFormat
from trtllm_megamoe.reference.metrics import rel_l2
from trtllm_megamoe.tuning.scratch import ProfilingScratch

QWEN = golden_layer("modelopt_nvfp4_qwen3_moe", 0)
DEEPSEEK = golden_layer("modelopt_nvfp4_deepseek_v3", 1)


pytestmark = pytest.mark.usefixtures("cpu_host")


# ---- construction, loading, forward


def test_backend_results_equal_the_oracle_in_every_era(base: str) -> None:
    moe = make_moe(base, QWEN, model_config(moe_max_num_tokens=3))
    assert type(moe.backend).__name__ == "TrtllmMegamoeBackend"
    load(moe, QWEN)
    rows = slice(0, 8)
    assert rel_l2(forward(moe, QWEN, rows, all_rank_num_tokens=[8]), oracle_of(QWEN, rows)) < REL_L2
    assert forward(moe, QWEN, slice(0, 0), all_rank_num_tokens=[0]).shape == (0, QWEN.x.shape[1])
    # rows of attention-DP padding are cut off before us and never come back
    assert forward(moe, QWEN, slice(0, 5), all_rank_num_tokens=[3]).shape[0] == 3
    moe.backend.shutdown()
    moe.backend.shutdown()


def test_layers_of_one_shape_take_turns_on_one_workspace(newest: str) -> None:
    """R53: scratch is allocated once for all layers of a model; the last one to be shut down gives it back."""
    layers = [make_moe(newest, QWEN, model_config(), layer_idx=index) for index in range(3)]
    other = make_moe(newest, QWEN, model_config(max_num_tokens=32), layer_idx=3)
    for moe in (*layers, other):
        load(moe, QWEN)
    used = {moe.backend.megamoe_layer.table for moe in layers}
    assert len(used) == 1 and other.backend.megamoe_layer.table not in used
    rows = slice(0, 8)
    expected = forward(layers[0], QWEN, rows, all_rank_num_tokens=[8])
    for moe in (layers[1], other, layers[2], layers[0]):
        assert torch.equal(forward(moe, QWEN, rows, all_rank_num_tokens=[8]), expected)
    for moe in layers[:2]:
        moe.backend.shutdown()
    assert torch.equal(forward(layers[2], QWEN, rows, all_rank_num_tokens=[8]), expected)


def test_backend_does_not_need_the_bases_weight_hooks(tmp_path: Path) -> None:
    """Some texts of era C leave them abstract in `MoE`."""
    head = "class MoE(MoEExecutionContractMixin, MoEWeightOwnerMixin, MoEEplbWeightLayoutMixin, nn.Module):\n"
    abstract = "".join(
        f"    def {name}(self{more}): raise NotImplementedError\n"
        for name, more in (("create_weights", ""), ("load_weights", ", weights, allow_partial_loading=False"),
                           ("transform_weights", ""), ("cache_derived_state", ""), ("post_load_weights", ""),
                           ("process_weights_after_loading", ""), ("pre_reload_weights", ""))
    )  # fmt: skip
    with installed_host(
        tmp_path, "C", lambda plan: plan.edit(f"{plan.moe_base}.interface", head, head + abstract)
    ) as name:
        importlib.import_module("trtllm_megamoe.host")
        moe = make_moe(name, QWEN, model_config())
        load(moe.backend, QWEN)
        rows = slice(0, 2)
        assert rel_l2(forward(moe, QWEN, rows), oracle_of(QWEN, rows)) < REL_L2


def test_backend_settings_reach_the_layer(newest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_MEGAMOE_ACTIVATIONS", "bf16")
    monkeypatch.setenv("MEGAMOE_COMBINE_FORMAT", "32e4m3xe8m0")
    moe = make_moe(newest, DEEPSEEK, model_config())
    load(moe, DEEPSEEK)
    rows = slice(0, 6)
    expected = oracle_of(DEEPSEEK, rows, ActivationMode.BF16, combine_format=CombineFormat.FP8)
    assert rel_l2(forward(moe, DEEPSEEK, rows), expected) < REL_L2
    assert rel_l2(forward(moe, DEEPSEEK, rows), oracle_of(DEEPSEEK, rows)) > 0.05


def test_backend_takes_the_architectures_score_placement(newest: str) -> None:
    """B33: weights before the requantisation give other numbers than weights after; V4 has them before."""
    rows = slice(0, 6)
    outputs = {}
    for architecture in ("DeepseekV4ForCausalLM", "DeepseekV3ForCausalLM"):
        config = model_config(pretrained_config=SimpleNamespace(architectures=[architecture]))
        moe = make_moe(newest, DEEPSEEK, config)
        load(moe, DEEPSEEK)
        outputs[architecture] = forward(moe, DEEPSEEK, rows)
        placement = moe.backend.megamoe_layer.config.score_placement
        assert rel_l2(outputs[architecture], oracle_of(DEEPSEEK, rows, score_placement=placement)) < REL_L2
    assert rel_l2(*outputs.values()) > 10 * REL_L2


def test_backend_reads_the_constants_from_the_hosts_carrier(newest: str) -> None:
    """Newest hosts: the backend declares what it executes, the host fills `activation_params`; no loose values."""
    activation = importlib.import_module(f"{newest}.activation")
    rows, limits = slice(0, 4), torch.full((16,), 0.5)
    constants = {"swiglu_limit": 0.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
    for carrier, expected in (
        (activation.SwigluBiasActivation(1.702, 1.0, limits), constants),
        (activation.SwigluActivation(clamp=0.25), {"swiglu_limit": 0.25}),
        (activation.SwigluActivation(), {}),
    ):  # fmt: skip
        moe = make_moe(newest, QWEN, model_config(), activation=carrier)
        assert not hasattr(moe.backend, "swiglu_limit")
        load(moe, QWEN)
        assert rel_l2(forward(moe, QWEN, rows), oracle_of(QWEN, rows, **expected)) < REL_L2
    limits[3] = 0.6
    with pytest.raises(ValueError, match="TrtllmMegamoeBackend only supports a uniform activation clamp"):
        make_moe(newest, QWEN, model_config(), activation=activation.SwigluActivation(clamp=limits))


@pytest.mark.parametrize("era", ["C", "D1"])
def test_backend_reads_loose_constants(era: str, tmp_path: Path) -> None:
    rows, limits = slice(0, 4), torch.full((16,), 0.5)
    with installed_host(tmp_path, era) as name:
        importlib.import_module("trtllm_megamoe.host")
        moe = make_moe(name, QWEN, model_config(), swiglu_limit=limits)
        load(moe, QWEN)
        assert rel_l2(forward(moe, QWEN, rows), oracle_of(QWEN, rows, swiglu_limit=0.5)) < REL_L2
        limits[3] = 0.6
        with pytest.raises(MegaMoeConfigError, match=r"swiglu_limit differs between experts \(0.5 to 0.6\)"):
            make_moe(name, QWEN, model_config(), swiglu_limit=limits)


def test_activation_that_only_the_models_configuration_names_is_refused(base: str) -> None:
    """Hosts without a carrier call a SiTU layer SwiGLU and look at the checkpoint's configuration."""
    for pretrained in (
        SimpleNamespace(activation_situ_beta=4.0),
        SimpleNamespace(text_config=SimpleNamespace(activation_situ_beta=4.0)),
    ):
        with pytest.raises(MegaMoeConfigError, match=r"SiTU \(activation_situ_beta\), must be Swiglu or SwigluBias"):
            make_moe(base, QWEN, model_config(pretrained_config=pretrained))


def test_layer_that_the_model_excludes_from_quantisation_afterwards_is_refused(base: str) -> None:
    """Exclusions come after the choice of the backend: create_weights is then called again with another format."""
    unquantised = importlib.import_module("tensorrt_llm._torch.model_config").QuantConfig(None)
    moe = make_moe(base, QWEN, model_config())
    moe.backend._weights_created = False  # what the host does to modules whose format it looks at again
    moe.backend.create_weights()
    assert moe.backend._weights_created
    moe.backend.quant_config = unquantised
    with pytest.raises(
        MegaMoeConfigError, match="layer 7: its experts are not quantised by the model's own exclusions"
    ):
        moe.backend.create_weights()


def test_backend_unknown_constructor_argument_is_refused_unless_empty(newest: str) -> None:
    backend = importlib.import_module("trtllm_megamoe.host.register").register().backend
    fields = {
        "routing_method": None,
        "num_experts": 16,
        "hidden_size": 256,
        "intermediate_size": 128,
        "model_config": model_config(),
    }
    assert backend(**fields, situ_beta=None, init_load_balancer=False) is not None
    assert backend(**fields, without_comm=True) is not None
    with pytest.raises(MegaMoeUnavailableError, match=r"situ_beta \(float\).*doctor --host"):
        backend(**fields, situ_beta=0.5)
    with pytest.raises(MegaMoeUnavailableError, match=r"per_expert_gain \(Tensor\)"):
        backend(**fields, per_expert_gain=torch.ones(16))
    with pytest.raises(ValueError, match="apply_router_weight_on_input"):
        backend(**fields, apply_router_weight_on_input=True)


def test_backend_hybrid_parallelism_is_refused_without_any_collective(
    newest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R7: PP 2 x EP 4 in a world of 8; MPI is not even imported."""
    ranks = importlib.import_module("trtllm_megamoe.host.ranks")
    monkeypatch.setattr(ranks, "mpi", lambda: pytest.fail("a communicator was built"))
    monkeypatch.setattr(ranks, "_mpi_world", lambda: pytest.fail("MPI was asked"))
    mapping = {"world_size": 8, "pp_size": 2, "tp_size": 4, "moe_ep_size": 4, "enable_attention_dp": True}
    with pytest.raises(MegaMoeConfigError, match=r"world has 8 ranks but moe_expert_parallel_size is 4.*pure DEP"):
        make_moe(newest, QWEN, model_config(mapping=mapping))


def test_backend_world_that_mpi_counts_differently_is_refused(newest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = importlib.import_module("trtllm_megamoe.host.ranks")
    monkeypatch.setattr(ranks, "_mpi_world", lambda: (0, 1))
    mapping = {"world_size": 4, "tp_size": 4, "rank": 2, "moe_ep_size": 4, "enable_attention_dp": True}
    with pytest.raises(MegaMoeConfigError, match="MPI says rank 0 of 1, the host's mapping says 2 of 4"):
        make_moe(newest, QWEN, model_config(mapping=mapping))


def test_cap_is_the_smaller_bound_and_more_is_an_error_naming_both(newest: str) -> None:
    """R2: never divided by the DP size; the error comes before any launch."""
    moe = make_moe(newest, QWEN, model_config(moe_max_num_tokens=40, max_num_tokens=20))
    load(moe, QWEN)
    backend = moe.backend
    assert backend.megamoe_layer.config.max_tokens_per_rank == 20
    with pytest.raises(MegaMoeCapacityError, match=r"21 tokens .* cap of 20"):
        backend.set_adaptive_launch_tokens(21)
    x, logits = QWEN.x[:4].bfloat16(), logits_of(QWEN, slice(0, 4))
    ids, weights = QWEN.topk_ids[:4].int(), logits[:, -QWEN.topk_ids.shape[1] :]
    ctx = run_context(newest, token_selected_experts=ids, token_final_scales=weights, x=x, x_sf=None)
    backend.set_adaptive_launch_tokens(4)
    backend.run_moe(ctx)
    assert backend.megamoe_layer.last_bucket == 8
    backend.run_moe(ctx)  # the hint was consumed
    assert backend.megamoe_layer.last_bucket == 20


def test_run_moe_refuses_what_it_cannot_do(newest: str) -> None:
    moe = make_moe(newest, QWEN, model_config())
    fields = {"token_selected_experts": None, "token_final_scales": None, "x": None, "x_sf": None}
    with pytest.raises(MegaMoeStateError, match="load weights first"):
        moe.backend.run_moe(run_context(newest, **fields))
    load(moe, QWEN)
    for change in ({"lora_params": {}}, {"do_finalize": False}, {"output_dtype": torch.float16}):
        with pytest.raises(MegaMoeConfigError):
            moe.backend.run_moe(run_context(newest, **(fields | change)))
    moe.comm = object()
    with pytest.raises(MegaMoeConfigError, match="brings its own communication"):
        moe.backend.validate_configurable_moe(moe)


# ---- weights


def test_sources_stay_empty_and_scales_follow_the_commit(newest: str) -> None:
    moe = make_moe(newest, QWEN, model_config())
    backend = moe.backend
    names = ("w3_w1_weight", "w3_w1_weight_scale", "w2_weight", "w2_weight_scale")
    assert all(getattr(backend, name).numel() == 0 for name in names) and backend.quant_scales == ()
    load(moe, QWEN)
    assert all(getattr(backend, name).numel() == 0 for name in names)
    addresses = [t.data_ptr() for t in backend.quant_scales]
    assert len(addresses) == 3
    moe.pre_reload_weights()
    load(moe, QWEN)
    assert [t.data_ptr() for t in backend.quant_scales] == addresses


def test_partial_loads_complete_at_the_finishing_hook(newest: str) -> None:
    moe = make_moe(newest, QWEN, model_config())
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in QWEN.tensors.items():
        parts.setdefault(name.split(".", 1)[1], {})[name] = tensor
    for suffix in sorted(parts, reverse=True):
        moe.load_weights([parts[suffix]], allow_partial_loading=True)
    moe.process_weights_after_loading()
    rows = slice(0, 5)
    assert rel_l2(forward(moe, QWEN, rows), oracle_of(QWEN, rows)) < REL_L2


def test_weights_reach_a_module_whose_creation_was_deferred(newest: str) -> None:
    """With a format per layer, or under the loader's own switch, nothing is created at construction."""
    moe = make_moe(newest, QWEN, model_config(skip_create_weights_in_init=True))
    assert moe.backend.megamoe_weights is None
    load(moe, QWEN)
    rows = slice(0, 2)
    assert rel_l2(forward(moe, QWEN, rows), oracle_of(QWEN, rows)) < REL_L2


def test_incomplete_load_names_what_is_missing(newest: str) -> None:
    moe = make_moe(newest, QWEN, model_config())
    without = {name: t for name, t in QWEN.tensors.items() if name != "3.w2.weight_scale"}
    with pytest.raises(MegaMoeWeightError, match=r"layer 7.*w2.weight_scale.*3"):
        moe.load_weights([without])
    with pytest.raises(MegaMoeStateError):
        forward(moe, QWEN, slice(0, 2))
    load(moe, QWEN)
    assert forward(moe, QWEN, slice(0, 2)).isfinite().all()


def test_failed_reload_holds_the_layer_until_repeated_or_accepted(newest: str) -> None:
    """R24: the layer keeps its old weights whole, but others may be new already, so forward refuses."""
    rows = slice(0, 3)
    moe = make_moe(newest, QWEN, model_config())
    load(moe, QWEN)
    before = forward(moe, QWEN, rows)
    broken = {name: t for name, t in QWEN.tensors.items() if not name.startswith("5.w1.weight")}
    for resolve in ("retry", "accept"):
        moe.pre_reload_weights()
        with pytest.raises(MegaMoeStateError, match="close the load window"):
            forward(moe, QWEN, rows)
        moe.load_weights([broken], allow_partial_loading=True)
        with pytest.raises(MegaMoeWeightError, match=r"already new: none; not replaced yet: layer 7"):
            moe.process_weights_after_loading()
        with pytest.raises(MegaMoeStateError, match=r"last reload failed.*accept_mixed_weights"):
            forward(moe, QWEN, rows)
        if resolve == "retry":
            load(moe, QWEN)
        else:
            importlib.import_module("trtllm_megamoe.host").accept_mixed_weights()
        assert torch.equal(forward(moe, QWEN, rows), before)


def test_fused_gate_up_loading_mode_is_refused(newest: str) -> None:
    mode = importlib.import_module(f"{newest}.interface").MoEWeightLoadingMode.FUSED_GATE_UP_PROJ
    moe = make_moe(newest, QWEN, model_config(), weight_loading_mode=mode)
    with pytest.raises(MegaMoeWeightError, match="FUSED_GATE_UP_PROJ is not supported"):
        moe.load_weights([QWEN.tensors])


# ---- warm-up


def test_model_built_from_tensors_without_memory_gets_real_weights(base: str) -> None:
    """The host's loader first builds models in a mode that makes each new tensor a placeholder."""
    mode = importlib.import_module("tensorrt_llm._torch.pyexecutor.engine").MetaInitMode
    with mode():
        assert torch.empty(1).is_meta
        moe = make_moe(base, QWEN, model_config())
    load(moe, QWEN)
    rows = slice(0, 2)
    assert rel_l2(forward(moe, QWEN, rows), oracle_of(QWEN, rows)) < REL_L2


def test_first_launch_prepares_every_bucket_once_and_never_inside_a_capture(
    newest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B44: the general warm-up runs one size; decode buckets must not meet their first time in the capture."""
    moe = make_moe(newest, QWEN, model_config(max_num_tokens=300))
    load(moe, QWEN)
    layer = moe.backend.megamoe_layer
    launched: list[int] = []
    engine_forward = layer._engine.forward
    monkeypatch.setattr(layer._engine, "forward", lambda *a: launched.append(a[-1]) or engine_forward(*a))
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_available", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(MegaMoeStateError, match=r"layer 7: the first launch .* inside a graph capture"):
            forward(moe, QWEN, slice(0, 2), all_rank_num_tokens=[2])
    assert launched == []
    for _ in range(2):
        forward(moe, QWEN, slice(0, 2), all_rank_num_tokens=[2])
    assert launched == [*layer.ladder.rungs, 8, 8] and len(layer.ladder.rungs) > 2


# ---- the host's tuning pass (R32, R33)


def profiling_scratches() -> list[Any]:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at every object wakes deprecated ones
        return [thing for thing in gc.get_objects() if isinstance(thing, ProfilingScratch)]


def test_tuning_pass_of_the_host_returns_early_without_scratch(newest: str) -> None:
    """Tactics are chosen offline: in the host's tuning mode a forward is a forward, and its tuner is asked nothing."""
    tuner = importlib.import_module("tensorrt_llm._torch.autotuner")
    moe = make_moe(newest, QWEN, model_config(max_num_tokens=20))
    load(moe, QWEN)
    fences = moe.backend._workspace.fences
    rows = slice(0, 2)
    expected = forward(moe, QWEN, rows, all_rank_num_tokens=[2])
    with tuner.autotune():
        assert tuner.AutoTuner.get().is_tuning_mode
        assert torch.equal(forward(moe, QWEN, rows, all_rank_num_tokens=[2]), expected)
        assert moe.backend.megamoe_layer.last_bucket == 8 and not fences.is_tuning and profiling_scratches() == []
    assert tuner.AutoTuner.get().questions == [] and fences.num_pairs == 1


def test_draft_engine_after_the_target_was_tuned_gets_its_own_turn(newest: str) -> None:
    """A speculative draft comes late and warms up again: same shape, same workspace; another shape, another one."""
    tuner = importlib.import_module("tensorrt_llm._torch.autotuner")
    rows = slice(0, 4)

    def engine(layer_idx: int, **options: Any) -> Any:
        moe = make_moe(newest, QWEN, model_config(**options), layer_idx=layer_idx)
        load(moe, QWEN)
        with tuner.autotune():
            forward(moe, QWEN, rows)
        return moe

    target = engine(0)
    before = forward(target, QWEN, rows)
    draft, small_draft = engine(61), engine(62, max_num_tokens=8)
    assert draft.backend._workspace is target.backend._workspace is not small_draft.backend._workspace
    for moe in (draft, target, small_draft, target):
        assert torch.equal(forward(moe, QWEN, rows), before)
    assert [m.backend._workspace.fences.num_pairs for m in (target, small_draft)] == [1, 1]
    assert profiling_scratches() == []


def test_configuration_of_a_call_is_not_kept(newest: str) -> None:
    """Nothing grows with the number of calls, and nothing outlives the model: no table of configurations exists."""
    ops = importlib.import_module("trtllm_megamoe.host.ops")
    adapter = importlib.import_module("trtllm_megamoe.host.adapter")
    gc.collect()  # layers of earlier tests
    before = len(ops._layers)
    moe = make_moe(newest, QWEN, model_config())
    load(moe, QWEN)
    sizes = []
    for _ in range(5):
        for count in (1, 2, 3, 5):
            forward(moe, QWEN, slice(0, count), all_rank_num_tokens=[count])
        gc.collect()
        sizes.append(len(gc.get_objects()))
    # what grows with calls grows in every round; the list of sizes itself may count, and other threads' first steps
    assert min(later - earlier for earlier, later in itertools.pairwise(sizes)) <= 1
    assert len(ops._layers) == before + 1 and len(adapter._backends) == 1
    del moe
    gc.collect()
    assert len(ops._layers) == before and len(adapter._backends) == 0


# ---- ranks agree


def test_handshake_difference_is_the_same_text_on_every_rank() -> None:
    handshake = importlib.import_module("trtllm_megamoe.host.ranks").handshake
    texts: dict[int, str] = {}

    def body(comm: Any) -> None:
        facts = {"combine_format": "fp8" if comm.rank == 2 else "bf16", "trtllm_megamoe": "1"}
        try:
            handshake(facts, comm, 20.0)
        except MegaMoeRankDivergenceError as err:
            texts[comm.rank] = str(err)

    run_threads(4, body, 60.0)
    assert len(texts) == 4 and len(set(texts.values())) == 1
    assert "combine_format" in texts[0] and "[2]" in texts[0] and "trtllm_megamoe:" not in texts[0]


def test_ranks_with_different_tactic_tables_all_stop_with_one_text(
    newest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank looks tactics up in is compared by its contents: a copy elsewhere is the same table."""
    register = importlib.import_module("trtllm_megamoe.host.register")
    mapping = importlib.import_module("tensorrt_llm.mapping").Mapping(world_size=3, tp_size=3, moe_ep_size=3)
    registration = register.register()
    here = threading.local()
    monkeypatch.setattr(register, "ep_communicator", lambda mapping, timeout_s: here.comm)
    monkeypatch.setattr(register, "table_path", lambda: here.table)
    for name, text in {"a": "one", "copy of a": "one", "b": "another"}.items():
        (tmp_path / name).write_text(text)

    def agree(tables: Sequence[Path | None]) -> list[str]:
        def body(comm: Any) -> str:
            here.comm, here.table = comm, tables[comm.rank]
            try:
                register._agree(mapping, registration.settings, registration.api, "layer 0", True, "ours", "")
            except MegaMoeRankDivergenceError as err:
                return str(err)
            return ""

        return run_threads(3, body, 60.0)

    a, copy, b, gone = (tmp_path / name for name in ("a", "copy of a", "b", "gone"))
    assert agree([a, copy, a]) == agree([None] * 3) == ["", "", ""]
    for tables, expected in (
        ([a, b, a], r"tactic table: '\w{16}' on ranks \[0, 2\], '\w{16}' on ranks \[1\]\."),
        ([a, a, None], r"tactic table: '\w{16}' on ranks \[0, 1\], 'none' on ranks \[2\]\."),
        ([a, gone, a], r"'unreadable \(No such file or directory\)' on ranks \[1\]\."),
    ):
        texts = agree(tables)
        assert len(set(texts)) == 1 and re.search(expected, texts[0]), texts


# ---- the operator


def test_operator_passes_opcheck_and_compiles_to_one_call(newest: str) -> None:
    moe = make_moe(newest, QWEN, model_config())
    load(moe, QWEN)
    backend, rows = moe.backend, slice(0, 5)
    x, ids = QWEN.x[rows].bfloat16(), QWEN.topk_ids[rows].int()
    weights = QWEN.topk_weights[rows].float()
    arguments = (x, ids, weights, 5, backend._handle)
    torch.library.opcheck(torch.ops.trtllm_megamoe.moe_forward.default, arguments)

    calls: list[str] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    context = importlib.import_module(f"{newest}.impl_contract").MoERunContext

    def run_moe(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = backend.run_moe(context(token_selected_experts=b, token_final_scales=c, x=a, x_sf=None))
        return out

    expected = run_moe(x, ids, weights)  # the warm-up, which prepares the layer
    compiled = torch.compile(run_moe, backend=count, fullgraph=True)
    assert torch.equal(compiled(x, ids, weights), expected)
    assert calls == ["trtllm_megamoe.moe_forward"]  # all of run_moe is one opaque call


def test_operator_handle_of_a_released_layer_is_an_error() -> None:
    ops = importlib.import_module("trtllm_megamoe.host.ops")
    with pytest.raises(MegaMoeStateError, match="handle 123456 is gone"):
        ops.moe_forward(torch.zeros(0, 4), torch.zeros(0, 1), torch.zeros(0, 1), 0, 123456)
