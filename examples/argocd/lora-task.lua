-- Health of a LoRATask for Argo CD. A task is Healthy when its adapter is in the store.
local status = obj.status or {}
local held = {}
for _, condition in ipairs(status.conditions or {}) do
  held[condition.type] = condition
end

local function is(type)
  return held[type] ~= nil and held[type].status == "True"
end

local function words(type)
  local condition = held[type] or {}
  if condition.message ~= nil and condition.message ~= "" then
    return (condition.reason or type) .. ": " .. condition.message
  end
  return condition.reason or type
end

-- What another object of the same sync may bring within a moment: the sync waits for it instead of failing.
local may_come = { SecretNotFound = true, ConfigMapNotFound = true, NoPipelineForModel = true }

if is("Succeeded") then
  local adapter = status.adapter or {}
  return { status = "Healthy", message = adapter.uri or words("Succeeded") }
end
if is("Failed") then
  local wished = (obj.metadata.annotations or {})["mlora.dev/retry"]
  if wished ~= nil and wished ~= status.retry then
    return { status = "Progressing", message = "failed, and is about to be tried again" }
  end
  return { status = "Degraded", message = words("Failed") }
end
if obj.spec ~= nil and obj.spec.suspend == true then
  return { status = "Suspended", message = "spec.suspend is true" }
end
if status.state == nil then
  return { status = "Progressing", message = "no operator has processed it yet" }
end
if status.observedGeneration ~= nil and status.observedGeneration < (obj.metadata.generation or 0) then
  return { status = "Progressing", message = "the operator has not yet seen the last change" }
end
if status.state == "Rejected" then
  local type = "Accepted"
  if is("Accepted") then
    type = "Admitted"
  end
  local reason = status.reason or (held[type] or {}).reason or ""
  local health = may_come[reason] and "Progressing" or "Degraded"
  return { status = health, message = words(type) }
end
if is("UploadBlocked") then
  return { status = "Degraded", message = words("UploadBlocked") }
end
local message = status.state
if status.progress ~= nil then
  message = message .. " " .. status.progress
end
if status.loss ~= nil then
  message = message .. ", loss " .. status.loss
end
return { status = "Progressing", message = message }
