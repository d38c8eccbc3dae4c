"""Convert models of other libraries to native models and back, by the names of their weights.

Reading a model runs no code of the other library and unpickles nothing. `source.py` defines how to
read a model and what a row of the table `SOURCES` contains, and `maps.py` how names and settings
correspond to native ones, in both directions. The other files contain the rows.
"""

from onescan.integrations.weights.convert import SOURCES as SOURCES
from onescan.integrations.weights.convert import convert_back as convert_back
from onescan.integrations.weights.convert import convert_model as convert_model
from onescan.integrations.weights.source import Foreign as Foreign
from onescan.integrations.weights.source import Source as Source
from onescan.integrations.weights.source import Tensors as Tensors
from onescan.integrations.weights.source import read as read
