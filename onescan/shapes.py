"""Tensor types for annotations, with named dimensions that are checked at run time in tests.

B  batch            T  tokens (sequence length)      D  model width
H  heads            K  key width per head            V  value width per head
N  chunks           C  tokens per chunk              E  hidden states per channel

F is the width of a rotated key: 2K with LRPE, which maps x to [x cos, x sin], otherwise K.
"""

import math
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

Hidden = Float[Tensor, "B T D"]
Queries = Float[Tensor, "B T H K"]
Keys = Float[Tensor, "B T H K"]
Values = Float[Tensor, "B T H V"]
Angles = Float[Tensor, "T H K"]
Frequencies = Float[Tensor, "H K"]
FrequencyRow = Float[Tensor, " K"]
RotatedKeys = Float[Tensor, "B T H F"]
Tokens = Int[Tensor, "B T"]
GeneratedTokens = Int[Tensor, "B generated"]
TokenLogits = Float[Tensor, "B scored vocabulary"]  # for all T tokens, or only the last
ReadOuts = Float[Tensor, "{read_outs}*B T D"]  # outputs of several blocks, concatenated
ReadOutLogits = Float[Tensor, "_ scored vocabulary"]  # the same, or for selected positions
Memory = Float[Tensor, "B S D"]  # S tokens of another sequence
CachedKeys = Float[Tensor, "B H S K"]
HeadsFirst = Float[Tensor, "B H T K"]  # as in torch's scaled_dot_product_attention
CachedKeep = Bool[Tensor, "B S"]
CachedSequence = Int[Tensor, "B S"]
Places = Int[Tensor, " B"]  # number of tokens so far in each sequence
Position = int | Int[Tensor, ""]  # number of tokens so far; a tensor in exported programs
MemoryMask = Bool[Tensor, "B S"]
Pooled = Float[Tensor, "B D"]
Keep = Bool[Tensor, "B T"]
TokenMask = Bool[Tensor, "B T"]  # selected positions
TokenIndices = Int[Tensor, " P"]  # selected positions, in the flattened batch
Starts = Bool[Tensor, "B T"]  # first tokens of packed sequences
ChunkStarts = Bool[Tensor, "B N"]  # first chunks of packed sequences
LowerBound = Float[Tensor, " D"]  # smallest decay factor of each channel of a block
Betas = Float[Tensor, "B T H"]  # write strengths of the delta rule
UpdateKeys = Float[Tensor, "B T *R H K"]  # R updates per token, or no such axis for a single one
UpdateValues = Float[Tensor, "B T *R H V"]
UpdateBetas = Float[Tensor, "B T *R H"]

LogNormalizer = Float[Tensor, "B H K"]
KeyValue = Float[Tensor, "B H F V"]
DecayedKeys = Float[Tensor, "B H K"]
DecayedKeyValue = Float[Tensor, "B H K V"]
LogDecays = Float[Tensor, "_ T _ _"]  # 1 or B, 1 or H, 1 or K: shared values are stored once

ToeplitzCoefficients = Float[Tensor, "axes D E"] | Float[Tensor, "axes 2 D E"]
JointWeights = Float[Tensor, "*directions D E"]  # a size of 2 per axis if bidirectional
Decays = Float[Tensor, "D E"]
DirectedDecays = Float[Tensor, "directions D E"]  # forward, and backward if there is one
HiddenStates = Float[Tensor, "B *lines D E"]  # one for each line along the first axis
ChannelsFirst = Float[Tensor, "D B *axes"]
Lines = Float[Tensor, "D lines positions"]  # all lines along one axis of a grid
LineStates = Float[Tensor, "D lines E"]
Samples = Float[Tensor, "D lines samples"]
Powers = Float[Tensor, "D _ E"]
Kernels = Float[Tensor, "D lags"]
JointKernels = Float[Tensor, "D *lags"]
Toeplitz = Float[Tensor, "D positions positions"]

DiffusionKernels = Float[Tensor, "H lags"]  # 2R+1 lags: K_ts = weights[R + t - s]
DiffusionKernel = Float[Tensor, " lags"]
StepSizes = Float[Tensor, " H"]
Leak = Float[Tensor, " H"] | Float[Tensor, "H K"]  # decay rates per token
TokenColumns = Float[Tensor, "T _"]  # all sequences and channels side by side
AllTokens = Float[Tensor, "B S H V"]  # tokens of a state and of a call, S in total
LastTokens = Float[Tensor, "B rows H V"]
LastColumns = Float[Tensor, "rows _"]  # columns of the last tokens
Toeplitz2d = Float[Tensor, "rows columns"]
Systems = Float[Tensor, "H systems T _"]  # one for all sequences, or one for each
RowSums = Float[Tensor, "H systems T"]
Operators = Float[Tensor, "H T T"]

Images = Float[Tensor, "B channels height width"]
# with as many channels as the input, or twice as many
DenoiserOutput = Float[Tensor, "B predicted *axes"]
Grids = Float[Tensor, "B channels *axes"]  # signals, images, video
GridFeatures = Float[Tensor, "B D *grid"]
GridOutputs = Float[Tensor, "B out_channels *sides"]
GridKeep = Bool[Tensor, "..."]  # [B, *sides], True for real pixels
Pictures = Float[Tensor, "B shown *sizes"]  # pixels drawn or decoded from grids
Logits = Float[Tensor, "B classes"]
Labels = Int[Tensor, " B"]
Timesteps = Float[Tensor, " B"] | Int[Tensor, " B"]  # noise levels, from 0 to 1000


class Grid(NamedTuple):
    """Layout of tokens: `prefix` tokens without a position, then a grid in row-major order.

    Attributes:
        shape: Number of tokens along each axis: (T,) for texts, (height, width) for images.
        prefix: Number of tokens before the grid, such as a class token. They have no position
            in the grid: position encodings skip them, and `tokens[:, prefix:]` are those of the
            grid.

    >>> Grid(shape=(14, 14), prefix=1).tokens
    197
    """

    shape: tuple[int, ...]
    prefix: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens, prefix included."""
        return self.prefix + math.prod(self.shape)
