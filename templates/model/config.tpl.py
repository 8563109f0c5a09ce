"""Constants of {{ spec.model.title }}. Nothing is computed at run time; the spec and the plan say where each comes from."""

from .._device.plan_line import PlanLine
from .._device.plan_line import Residency as R

MODEL = "{{ spec.model.name }}"
VOCAB_SIZE = {{ spec.vocabulary.target }}  # vocabulary.target: rows of the Markov embedding, ids of the draft tokens
DRAFT_VOCAB_SIZE = {{ spec.vocabulary.draft }}  # vocabulary.draft: rows of the Markov head
D2T = {{ spec.vocabulary.d2t }}  # vocabulary.d2t: target id = draft id + d2t[draft id]; else they are the same
SAMPLING_LIMIT = {{ spec.vocabulary.sampling_limit }}  # vocabulary.sampling_limit: target ids from here on are never drawn
DRAWN_COLUMNS = {{ plan.drawn }}  # of the Markov head, those that can be drawn: without d2t, as many as the limit allows
RANK_DIM = {{ spec.markov.rank_dim }}  # markov.rank_dim
NUM_STEPS = {{ spec.draft.num_steps }}  # draft.num_steps: positions a call draws
QUERY_PER_ROW = {{ plan.query_per_row }}  # query rows of a request: num_steps, and one more where the anchor is not sampled from
FIRST_QUERY = {{ plan.first_query }}  # query row of a request that the first draft token is drawn from; the anchor is query row 0
MAX_ROWS = {{ spec.draft.max_rows }}  # draft.max_rows: request rows of a chain launch
BASE_DTYPES = {{ spec.logits.base_dtypes }}  # logits.base_dtypes
CACHE_DTYPES = {{ spec.logits.cache_dtypes }}  # logits.cache_dtypes; none: greedy drafts, without a cache
TP_SIZES = {{ spec.parallel.tp }}  # parallel.tp
TRANSFORM = "{{ spec.logits.transform.placement }}"  # logits.transform.placement: what multiplier and cap apply to
MULTIPLIER = {{ plan.multiplier }}  # logits.transform.multiplier, in fp32
SOFT_CAP = {{ plan.soft_cap }}  # logits.transform.soft_cap, in fp32
INVERSE_SOFT_CAP = {{ plan.inverse_soft_cap }}  # 1 / SOFT_CAP in fp32: the engine divides by a number through this factor
BASE_CAPPED = {{ spec.logits.transform.base_capped }}  # logits.transform.base_capped: base logits come transformed
NOISE_SCHEME = "{{ spec.noise.scheme }}"  # noise.scheme
DRAFT_SALT = {{ spec.noise.draft_salt }}  # noise.draft_salt: added to the position that the noise is keyed by
STEP_MIX = {{ spec.noise.step_mix }}  # noise.step_mix: the position's index is mixed into the seed
DTYPE_BYTES = {"bf16": 2, "fp32": 4}

# Step kernels: (most request rows, vocabulary entries of a block), ascending; the block size beyond; most rows launched with PDL.
STEP_BLOCKS = (
    # % for line in spec.step.block_sizes
    ({{ line.max_rows }}, {{ line.block }}),
    # % endfor
)
STEP_DEFAULT_BLOCK = {{ spec.step.default_block }}  # step.default_block
STEP_PDL_MAX_ROWS = {{ spec.step.pdl_max_rows }}  # step.pdl_max_rows

# Packets that ranks gather between step kernels, in 32-bit words: their width, and by field the first word and the width.
PACKET_WORDS = {{ spec.packet.words }}  # packet.words
PACKET_FIELDS = {
    # % for field in spec.packet.fields
    "{{ field.name }}": ({{ field.word }}, {{ field.words }}),
    # % endfor
}

# An exchange record is score 32, token id ID_BITS, sequence tag the rest.
ID_BITS = {{ plan.id_bits }}

# Name: compute capability, streaming multiprocessors, shared memory of a block in bytes.
DEVICES = {
    # % for device in plan.planned_devices
    "{{ device.name }}": ({{ device.compute_capability }}, {{ device.sms }}, {{ device.smem_per_block_bytes }}),
    # % endfor
}

# (device, tp, row slots): those, ctas, warps, tiles; for bf16 and for fp32 base logits R(register tiles a warp, chunks of them, resident,
# ring, ahead, keep); bytes of shared memory of a CTA; whether the last tile of a shard is partial.
PLANS = {
    # % for x in plan.lines
    ("{{ x.device }}", {{ x.tp }}, {{ x.row_slots }}): PlanLine("{{ x.device }}", {{ x.tp }}, {{ x.row_slots }}, {{ x.ctas }}, {{ x.warps }}, {{ x.tiles }}, R({{ x.bf16 | join(", ") }}), R({{ x.fp32 | join(", ") }}), {{ x.shared_bytes }}, {{ x.partial }}),
    # % endfor
}
