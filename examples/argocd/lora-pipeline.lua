-- Health of a LoRAPipeline for Argo CD. A pipeline that nobody needs is scaled to zero, and Healthy.
local status = obj.status or {}
local held = {}
for _, condition in ipairs(status.conditions or {}) do
  held[condition.type] = condition
end

local function words(type)
  local condition = held[type] or {}
  if condition.message ~= nil and condition.message ~= "" then
    return (condition.reason or type) .. ": " .. condition.message
  end
  return condition.reason or status.state or type
end

if status.state == nil then
  return { status = "Progressing", message = "no operator has processed it yet" }
end
if status.observedGeneration ~= nil and status.observedGeneration < (obj.metadata.generation or 0) then
  return { status = "Progressing", message = "the operator has not yet seen the last change" }
end
if status.state == "Failed" then
  -- Its Secret may come with the same sync.
  local reason = (held["Ready"] or {}).reason
  local health = reason == "SecretNotFound" and "Progressing" or "Degraded"
  return { status = health, message = words("Ready") }
end
if held["Stalled"] ~= nil and held["Stalled"].status == "True" then
  return { status = "Degraded", message = words("Stalled") }
end
if status.state == "Ready" then
  return { status = "Healthy", message = tostring(status.activeTasks or 0) .. " tasks train" }
end
if status.state == "Idle" then
  return { status = "Healthy", message = "idle; the next task starts the workers" }
end
return { status = "Progressing", message = words("Ready") }
