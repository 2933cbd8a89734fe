-- SPDX-License-Identifier: GPL-3.0-or-later
-- What workers of each kind have loaded, and the one list that clients see. Knows nothing of HAProxy.

local json = require("cjson")

local catalogue = {}

-- Where a kind of worker tells which models it has loaded, and, where that is another list, which it could load.
local V1 = { loaded = "/v1/models" }
catalogue.places = {
  vllm = V1,
  openai = V1,
  llama_cpp = V1,
  ollama = { loaded = "/api/ps", loadable = "/api/tags" },
  llama_swap = { loaded = "/running", loadable = "/v1/models" },
}

-- The parts of an answer: its list, and of each item the name and, where it has one, the state that means "loaded".
local SHAPES = {
  ["/v1/models"] = { list = "data", name = "id" },
  ["/api/ps"] = { list = "models", name = "name" },
  ["/api/tags"] = { list = "models", name = "name" },
  ["/running"] = { list = "running", name = "model", state = "ready" },
}

-- What a client may learn of a model: the plain values alone, as nested ones do not survive being read and written.
local function entry_of(name, item)
  local entry = { id = name, object = "model", created = 0, owned_by = "gateway" }
  for _, key in ipairs({ "object", "created", "owned_by", "root", "parent", "max_model_len" }) do
    local value = item[key]
    if type(value) == "string" or type(value) == "number" then
      entry[key] = value
    end
  end
  return entry
end

-- A llama.cpp that serves several models tells of each whether it is loaded; all others list only what is.
local function is_loaded(item, shape)
  if shape.state then
    return item.state == nil or item.state == shape.state
  end
  return type(item.status) ~= "table" or item.status.value == nil or item.status.value == "loaded"
end

-- The models that an answer to GET `place` tells: two tables of name to entry, loaded and not loaded; raises an error for
-- an answer that is none.
function catalogue.models_in(place, text)
  local shape = SHAPES[place]
  local list = json.decode(text)[shape.list]
  if list == nil or list == json.null and place == "/v1/models" then
    error("no list " .. shape.list)
  end
  local loaded, others = {}, {}
  for _, item in ipairs(list == json.null and {} or list) do
    local name = item[shape.name]
    if type(name) == "string" and name ~= "" then
      local where = is_loaded(item, shape) and loaded or others
      where[name] = entry_of(name, item)
    end
  end
  return loaded, others
end

-- Further names that a worker of this kind takes for a model.
function catalogue.short_name(kind, name)
  return kind == "ollama" and name:match("^(.+):latest$") or nil
end

-- The list of models as clients get it, each once, sorted by name; `entries` is a table of name to entry.
function catalogue.list(entries)
  local names = {}
  for name in pairs(entries) do
    names[#names + 1] = name
  end
  table.sort(names)
  local items = {}
  for index, name in ipairs(names) do
    items[index] = json.encode(entries[name])
  end
  return '{"object":"list","data":[' .. table.concat(items, ",") .. "]}"
end

return catalogue
