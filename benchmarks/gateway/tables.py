from typing import Any
def tables(r: dict[str, Any]) -> str:
    import json
    return "\n".join(f"{k}: {json.dumps(x)}" for k in r if isinstance(r[k], list) for x in r[k])
