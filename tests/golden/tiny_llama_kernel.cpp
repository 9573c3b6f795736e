// Generated: a list of task variants. The algorithms are in the headers.
#define MEGAKERNEL_UNITS 1  // of the longest input
#define MEGAKERNEL_BEFORE_PAGES 3  // see `stages_before_pages`
#include "megakernel_abi.h"
#include "megakernel/device/cpu.h"
#include "megakernel/device/cpu_peer.h"
#include "megakernel/tasks/advance.cuh"
#include "megakernel/tasks/attention.cuh"
#include "megakernel/tasks/combine.cuh"
#include "megakernel/tasks/embedding.cuh"
#include "megakernel/tasks/matmul.cuh"
#include "megakernel/tasks/norm.cuh"
#include "megakernel/tasks/sample.cuh"
#include MEGAKERNEL_DRIVER

namespace megakernel::tasks {
using Tasks = TaskList<
    Embedding<EmbeddingConfig{.dtype = DType::kF32, .positions = false, .inputs = false, .gives = false}>,
    Matmul<MatmulConfig{.dtype = DType::kF32, .tile_n = 32, .norm = true, .epilogue = Epilogue::kStore, .activation = Activation::kSilu, .bias = true, .sampled = false, .softcap = false, .rounds = 0, .even = false, .gives = false, .given = false, .dealt = false, .gives_wide = 0, .given_wide = false}>,
    Attention<AttentionConfig{.kv_dtype = DType::kF32, .head_dim = 8, .group = 3, .kv_heads = 2, .rotary_dim = 8, .interleaved = false, .page_tokens = 32, .piece_tokens = 256, .q_norm = false, .k_norm = false, .softcap = false}>,
    Combine<CombineConfig{.head_dim = 8, .heads = 6, .shares = 1, .piece_tokens = 256, .gives = false, .half = false, .gives_wide = 0}>,
    Matmul<MatmulConfig{.dtype = DType::kF32, .tile_n = 32, .norm = false, .epilogue = Epilogue::kResidual, .activation = Activation::kSilu, .bias = true, .sampled = false, .softcap = false, .rounds = 0, .even = false, .gives = false, .given = false, .dealt = false, .gives_wide = 0, .given_wide = false}>,
    Matmul<MatmulConfig{.dtype = DType::kF32, .tile_n = 32, .norm = true, .epilogue = Epilogue::kGlu, .activation = Activation::kSilu, .bias = true, .sampled = false, .softcap = false, .rounds = 0, .even = false, .gives = false, .given = false, .dealt = false, .gives_wide = 0, .given_wide = false}>,
    Matmul<MatmulConfig{.dtype = DType::kF32, .tile_n = 32, .norm = true, .epilogue = Epilogue::kStore, .activation = Activation::kSilu, .bias = false, .sampled = true, .softcap = false, .rounds = 0, .even = false, .gives = false, .given = false, .dealt = false, .gives_wide = 0, .given_wide = false}>,
    Sample<SampleConfig{}>,
    Advance<AdvanceConfig{.inputs = false, .paced = true}>>;
}  // namespace megakernel::tasks

MEGAKERNEL_ENTRY(megakernel::tasks::Tasks)
