"""Read rows of Arrow tables as they were written: Parquet files, and data sets of `datasets`.

A column of objects has one type, so Arrow gives each object the fields of all, null where it has
none. Such nulls are taken out again. A null that was written as the value of a field cannot be told
from them and goes as well; nulls in lists stay, and so does all in columns of JSON text, as
`datasets` stores objects of different fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def arrow_rows(table: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table or record batch, with None where a column is null."""
    types = {field.name: field.type for field in table.schema}
    for row in table.to_pylist():
        yield {name: _written(value, types[name]) for name, value in row.items()}


def _written(value: Any, of_type: Any) -> Any:
    import pyarrow as pa

    if value is None:
        return None
    if isinstance(of_type, pa.BaseExtensionType):
        is_json = of_type.extension_name == "arrow.json"
        return json.loads(value) if is_json else _written(value, of_type.storage_type)
    if pa.types.is_struct(of_type):
        fields = ((field.name, field.type) for field in of_type)
        return {n: _written(value[n], kind) for n, kind in fields if value[n] is not None}
    if pa.types.is_map(of_type):
        return {key: _written(item, of_type.item_type) for key, item in value}
    if pa.types.is_nested(of_type) and isinstance(value, list):
        return [_written(item, of_type.value_type) for item in value]
    return value
