"""Import stand-in for SGLang's compiled `sgl_kernel`, whose CPU build is on no package index and needs AVX512.

With SGLANG_USE_CPU_ENGINE=1, sglang 0.5.23 imports the names below when its modules load, without asking whether
the processor has AMX. They belong to speculative decoding and to moving cache rows, which the tiny test engines
never do, so each raises when called. No operator is registered with torch: SGLang then finds no AMX support and
takes its PyTorch-native path in every layer.
"""

from typing import NoReturn

__version__ = "0.0.0"

_IMPORTED_AT_LOAD = (
    "copy_all_layer_kv_cache_cpu",
    "assign_req_to_token_pool_cpu",
    "rotate_input_ids_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "verify_tree_greedy_cpu",
)


class _Absent:
    """A kernel that can be imported but not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{self.__name__} needs SGLang's compiled kernels; "
            "the CPU test engine runs without them (no speculative decoding, no cache moves)"
        )


for _name in _IMPORTED_AT_LOAD:
    globals()[_name] = _Absent(_name)
