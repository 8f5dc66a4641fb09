"""Names under which `jax.export` stores the package's pytrees, so that exported programs may take and return them."""

import json

from jax import export

from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.formats import QuantizedArray
from jax_warp_decode.routing import Routing

# The names are part of the file format of every exported program: never rename one.
for _kind in (Routing, ExpertWeights, QuantizedArray):
    export.register_pytree_node_serialization(
        _kind,
        serialized_name=f"jax_warp_decode.{_kind.__name__}",
        serialize_auxdata=lambda fields: json.dumps(fields).encode(),
        deserialize_auxdata=lambda fields: tuple(json.loads(bytes(fields))))
