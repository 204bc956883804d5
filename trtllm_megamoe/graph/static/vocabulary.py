# SPDX-License-Identifier: Apache-2.0
"""What the scanner knows of Python, PyTorch and NumPy: names only, no logic.

A bare name is valid both as a `torch` function and as a tensor method unless a table says otherwise.
"""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- tensors: facts that are free ------------------------------------------------------------------------------------
HOST_ATTRIBUTES = _words(
    "shape dtype device ndim is_cuda layout requires_grad is_leaf itemsize nbytes names grad_fn is_sparse "
    "is_quantized is_meta is_cpu"
)
HOST_METHODS = _words(
    "size dim numel nelement stride data_ptr element_size is_contiguous storage_offset get_device "
    "is_floating_point is_complex untyped_storage storage ndimension is_pinned is_shared is_same_size is_signed "
    "type_as_str is_inference is_conj is_neg __len__ __dlpack_device__"
)
HOST_TORCH = _words(
    "torch.is_tensor torch.is_floating_point torch.is_complex torch.numel torch.finfo torch.iinfo "
    "torch.get_default_dtype torch.is_grad_enabled torch.is_inference_mode_enabled torch.cuda.is_available "
    "torch.cuda.current_device torch.cuda.device_count torch.cuda.get_device_capability "
    "torch.cuda.get_device_properties torch.Size torch.dtype torch.compiler.is_compiling torch.broadcast_shapes "
    "torch.result_type torch.promote_types torch.cuda.is_current_stream_capturing torch.cuda.memory_allocated "
    "torch.cuda.max_memory_allocated"
)

# --- evidence that a value of unknown origin is a tensor -------------------------------------------------------------
TENSOR_METHODS = _words(
    "any all argmax argmin sum mean prod amax amin std var norm softmax log_softmax sigmoid tanh relu exp log "
    "sqrt rsqrt unsqueeze squeeze view reshape permute transpose contiguous expand expand_as flatten unflatten "
    "masked_fill masked_fill_ index_select index_copy_ index_add_ scatter scatter_ scatter_add_ gather topk "
    "argsort cumsum float half bfloat16 long bool int double detach clone zero_ fill_ copy_ clamp clamp_ mul_ "
    "add_ sub_ div_ matmul mm bmm nonzero masked_select unique repeat_interleave narrow isnan isinf isfinite "
    "logical_and logical_or logical_not eq ne lt le gt ge where abs neg bitwise_and bitwise_or random_ "
    "exponential_ uniform_ normal_ bernoulli_ multinomial roll tril triu count_nonzero bincount new_zeros "
    "new_empty new_ones new_full new_tensor max min unbind chunk split view_as reshape_as dim numel element_size "
    "data_ptr is_contiguous item tolist cpu cuda square pow t"
)
TENSOR_ATTRIBUTES = _words("shape dtype device ndim is_cuda T mT grad layout")
# Methods that lists, dicts, strings or configuration objects also have: no evidence on their own.
AMBIGUOUS_METHODS = _words("split index copy where log t dim chunk")
TENSOR_NAMES = re.compile(
    r"^(x|hidden|hidden_states|logits|probs|scores|mask|tensor|residual|topk_ids|topk_weights|expert_ids|router_logits|"
    r"routing_weights|input_ids|token_ids|position_ids|positions|kv_cache|next_tokens?|[a-z_]+_mask|[a-z_]+_logits|"
    r"[a-z_]+_tensor)$"
)
HOST_TENSOR_NAMES = re.compile(r"(_cpu|_host)$")
PINNED_NAMES = re.compile(r"(^|_)pinned($|_)")
NUMPY_NAMES = re.compile(r"(_np|_numpy)$")
MASK_NAMES = re.compile(r"(^|_)mask(s|ed)?($|_)")
COUNT_NAMES = re.compile(r"(^|[_.])(counts|lengths|lens|repeats)$|tokens_per_expert$")
COUNTER_NAMES = re.compile(r"(^|_)(step|steps|count|counter|iteration|tick)$")

# --- results ---------------------------------------------------------------------------------------------------------
BOOL_RESULTS = _words(
    "any all eq ne lt le gt ge isnan isinf isfinite isclose logical_and logical_or logical_not logical_xor isin "
    "bool greater less greater_equal less_equal not_equal isposinf isneginf signbit"
)
INT_RESULTS = _words(
    "argmax argmin argsort nonzero argwhere long int count_nonzero bincount searchsorted bucketize arange randint "
    "randperm multinomial one_hot"
)
FLOAT_RESULTS = _words("float half bfloat16 double softmax log_softmax exp log sqrt rsqrt sigmoid")
REARRANGEMENTS = _words(
    "view reshape view_as reshape_as flatten unflatten squeeze unsqueeze expand expand_as permute transpose t "
    "contiguous clone detach repeat roll flip gather index_select narrow select masked_fill logical_and_ "
    "bitwise_and bitwise_or bitwise_not movedim broadcast_to to"
)
FULL_REDUCTIONS = _words(
    "sum max min mean prod any all argmax argmin amax amin norm std var median count_nonzero nansum nanmean"
)
PAIR_RESULTS = _words("max min median mode kthvalue sort topk cummax cummin aminmax")
SEQUENCE_RESULTS = _words(
    "unbind chunk split tensor_split split_with_sizes hsplit vsplit dsplit meshgrid broadcast_tensors"
)
FLOAT_DTYPES = _words("float float16 float32 float64 half bfloat16 double float8_e4m3fn float8_e5m2")
INT_DTYPES = _words("int int8 int16 int32 int64 long short uint8 uint16 uint32 uint64")

# --- explicit transfers and hidden reads -----------------------------------------------------------------------------
READ_METHODS = _words("item tolist numpy __array__")
HOST_CASTS = _words("int float bool complex round")
NUMPY_READS = _words("numpy.array numpy.asarray numpy.ascontiguousarray numpy.copy")
IMPLICIT_READS = _words("equal allclose is_nonzero histc inverse pinverse cholesky lstsq")
IMPLICIT_READS_DOTTED = _words(
    "torch.save pickle.dumps pickle.dump copy.deepcopy torch.testing.assert_close torch.linalg.inv "
    "torch.linalg.solve torch.linalg.cholesky torch.linalg.eigh torch.linalg.eigvalsh torch.linalg.svd "
    "torch.linalg.lstsq torch.linalg.matrix_rank torch.nn.utils.rnn.pack_padded_sequence "
    "torch.nn.utils.rnn.pad_packed_sequence"
)
HOST_MATH_MODULES = ("math.", "statistics.", "operator.index", "operator.truth")

# --- shapes ----------------------------------------------------------------------------------------------------------
DATA_DEPENDENT = _words("nonzero argwhere masked_select unique unique_consecutive bincount combinations")
# Arguments that must be host integers; the receiver (or first argument of the torch function) is the tensor.
SIZE_METHODS = _words(
    "view reshape expand repeat narrow topk split chunk roll unfold select unsqueeze flatten unflatten tile "
    "movedim diagonal tril triu new_zeros new_empty new_ones new_full split_with_sizes tensor_split kthvalue "
    "resize_ pad interpolate one_hot as_strided"
)
FACTORIES = _words(
    "empty zeros ones full arange linspace logspace eye tensor as_tensor from_numpy empty_strided scalar_tensor "
    "tril_indices triu_indices range hann_window"
)
LIKE_FACTORIES = _words("empty_like zeros_like ones_like full_like rand_like randn_like randint_like")
RANDOM_FACTORIES = _words("rand randn randint randperm normal")
NEW_METHODS = _words("new_zeros new_empty new_ones new_full new_tensor new clone")
NUMPY_FACTORIES = _words(
    " ".join(
        f"numpy.{n}"
        for n in (
            "zeros",
            "empty",
            "ones",
            "full",
            "arange",
            "linspace",
            "eye",
            "concatenate",
            "stack",
            "zeros_like",
            "empty_like",
        )
    )
)
GROWERS = _words("cat concat concatenate stack hstack vstack")
FROM_HOST_DATA = _words("tensor as_tensor from_numpy asarray")

# --- resources, compilation, random numbers, synchronisation ---------------------------------------------------------
RESOURCES = _words(
    "torch.cuda.Stream torch.cuda.Event torch.cuda.CUDAGraph torch.Generator torch.cuda.graph_pool_handle "
    "torch.Stream torch.Event torch.cuda.ExternalStream"
)
COMPILERS = _words(
    "torch.compile torch.jit.script torch.jit.trace torch.jit.load torch.utils.cpp_extension.load "
    "torch.utils.cpp_extension.load_inline cutlass.cute.compile cute.compile torch.cuda.make_graphed_callables "
    "torch.export.export triton.compile cupy.RawKernel cupy.RawModule torch.fx.symbolic_trace"
)
HOST_RNG_MODULES = ("random.", "numpy.random.", "secrets.")
HOST_RNG = _words("os.urandom uuid.uuid4 uuid.uuid1 torch.initial_seed")
HOST_RNG_OBJECTS = _words("random.Random random.SystemRandom numpy.random.default_rng numpy.random.RandomState")
RESEEDS = _words(
    "torch.manual_seed torch.seed torch.cuda.manual_seed torch.cuda.manual_seed_all torch.cuda.seed "
    "torch.cuda.seed_all torch.get_rng_state torch.set_rng_state torch.cuda.get_rng_state "
    "torch.cuda.set_rng_state torch.random.fork_rng torch.random.manual_seed"
)
SYNCS = _words(
    "torch.cuda.synchronize torch.accelerator.synchronize torch.xpu.synchronize torch.cuda.empty_cache "
    "torch.cuda.ipc_collect torch.distributed.barrier torch.distributed.monitored_barrier time.sleep "
    "torch.cuda.memory.empty_cache torch.accelerator.empty_cache"
)
SYNC_METHODS = _words("synchronize elapsed_time cudaDeviceSynchronize cudaStreamSynchronize cudaEventSynchronize")
BARRIER_RECEIVERS = re.compile(r"(dist|distributed|comm|group|world)$", re.IGNORECASE)
OBJECT_COLLECTIVES = _words(
    "all_gather_object broadcast_object_list gather_object scatter_object_list send_object_list recv_object_list"
)
COLLECTIVES = re.compile(
    r"^(tensor_model_parallel_)?(all_reduce|all_gather|all_to_all|reduce_scatter|alltoall|allreduce|allgather|"
    r"reducescatter|dispatch|combine)([a-z_]*)$"
)

# --- formatting ------------------------------------------------------------------------------------------------------
LOG_METHODS = _words("debug info warning warn error exception critical log info_once warning_once debug_once")
LOG_RECEIVERS = re.compile(r"(^|_)(log|logger|logging)$", re.IGNORECASE)
METRIC_METHODS = _words("add_scalar add_histogram observe")
FORMATTERS = _words("str repr format print ascii")
BUILTIN_REDUCTIONS = _words("sum min max any all sorted")
LIST_SEARCHES = _words("index count remove")

# --- functions that prepare a step rather than run it ----------------------------------------------------------------
SETUP_FUNCTIONS = re.compile(
    r"^(__(?!call__).*__|.*load.*|.*save.*|state_dict|reset.*|create.*|process_weights.*|warm_?up.*|.*_warm_?up|profile.*|"
    r"capture.*|_capture.*|main|test_.*|from_.*|_?setup.*|_?init.*|_?build.*|_?make_.*|_?alloc.*|get_config|_?register.*|close|"
    r"shutdown|extra_repr|_?dummy.*|_?tune.*|_?prepare_weights.*|_?validate.*|set_.*|exit|stop|_?fake.*|_?check_.*|support.*|is_supported)$"
)
