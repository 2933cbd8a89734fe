-- SPDX-License-Identifier: GPL-3.0-or-later
-- Which requests belong together, and which copy is theirs. Knows nothing of HAProxy.
--
-- An engine keeps what it has computed for the beginning of a prompt. Requests that share a long beginning are of one
-- conversation, or of one program with one system prompt and one first question: these get the same key. Each key has an order of
-- all copies (rendezvous hashing), so that one that comes or goes moves only the keys that are its own.

local json = require("cjson")

local affinity = {}

-- A client's own name for a conversation may have so many bytes; a longer one counts as none.
local LONGEST_SESSION = 256
-- So many bytes of a plain prompt make the key: it has no parts to tell its beginning from what grows.
local PROMPT_BYTES = 512

local SEPARATOR = "\0"

local function is_filled(value)
  return type(value) == "string" and value ~= ""
end

-- Text as it is, parts of text joined; of an image its length alone, which tells two apart well enough.
local function text_of(content)
  if type(content) == "string" then
    return content
  elseif type(content) ~= "table" then
    return ""
  end
  local texts = {}
  for _, part in ipairs(content) do
    if type(part) == "string" then
      texts[#texts + 1] = part
    elseif type(part) == "table" then
      local image = type(part.image_url) == "table" and part.image_url.url or part.image_url
      if type(part.text) == "string" then
        texts[#texts + 1] = part.text
      elseif type(image) == "string" then
        texts[#texts + 1] = "image " .. #image
      end
    end
  end
  return table.concat(texts, SEPARATOR)
end

-- What stands before the first answer: all before the first user's message that instructs, and that message.
local function beginning(messages)
  local texts = {}
  for _, message in ipairs(type(messages) == "table" and messages or {}) do
    if type(message) == "table" then
      local role = message.role
      if role == "system" or role == "developer" then
        texts[#texts + 1] = text_of(message.content)
      elseif role == "user" then
        texts[#texts + 1] = text_of(message.content)
        return table.concat(texts, SEPARATOR)
      end
    end
  end
  return nil
end

local function joined(instructions, first)
  return first and text_of(instructions) .. SEPARATOR .. first
end

local function first_prompt(prompt)
  if type(prompt) == "table" then
    prompt = prompt[1]
  end
  return is_filled(prompt) and prompt:sub(1, PROMPT_BYTES) or nil
end

-- For each path: the text that requests of one conversation share; nil where there is none.
local SHARED = {
  ["/v1/chat/completions"] = function(body)
    return beginning(body.messages)
  end,
  ["/v1/messages"] = function(body)
    return joined(body.system, beginning(body.messages))
  end,
  ["/v1/responses"] = function(body)
    return joined(body.instructions, is_filled(body.input) and body.input or beginning(body.input))
  end,
  ["/v1/completions"] = function(body)
    return first_prompt(body.prompt)
  end,
}

-- The key of a request, a short string; nil where nothing tells what it belongs to. `digest` makes a number of a string.
function affinity.key(path, session, model, body, digest)
  if is_filled(session) and #session <= LONGEST_SESSION then
    return "session " .. digest(session)
  end
  local shared = SHARED[path]
  local understood, value = pcall(json.decode, shared and body or "")
  if not understood or type(value) ~= "table" then
    return nil
  end
  if is_filled(value.prompt_cache_key) then
    return "cache " .. digest(value.prompt_cache_key)
  end
  local text = shared(value)
  return text and "text " .. digest(model .. SEPARATOR .. text)
end

-- The name of the copy that a request with this key goes to: the first in the key's order that has a free place and less
-- than `bound` per cent of its part of the load, by weight, this request included; nil where there is none. Of each of the
-- `copies`: name, weight, in_flight, free.
function affinity.home(key, copies, bound, digest)
  local load, weight = 1, 0
  for _, copy in ipairs(copies) do
    load, weight = load + copy.in_flight, weight + copy.weight
  end
  local best, best_rank
  for _, copy in ipairs(copies) do
    local most = math.ceil(load * bound / 100 * copy.weight / weight)
    if copy.free > 0 and copy.in_flight < most then
      local rank = digest(key .. SEPARATOR .. copy.name)
      if not best or rank > best_rank then
        best, best_rank = copy.name, rank
      end
    end
  end
  return best
end

return affinity
