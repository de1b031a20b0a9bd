{{- define "mlora.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* A release may begin with a digit and have dots, a Service may not. */}}
{{- define "mlora.fullname" -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $name := include "mlora.name" . -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- $full = $full | replace "." "-" -}}
{{- if not (regexMatch "^[a-z]" $full) -}}
{{- $full = printf "mlora-%s" $full -}}
{{- end -}}
{{- $full | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "mlora.selector" -}}
app.kubernetes.io/name: {{ include "mlora.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "mlora.labels" -}}
{{ include "mlora.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "mlora.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "mlora.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Repository and digest of .image, else its tag, else the chart's version. */}}
{{- define "mlora.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* What a schema cannot say, and the operator would refuse at its start. */}}
{{- define "mlora.checked" -}}
{{- with .Values.leaderElection -}}
{{- if ge (int64 .deadlineSeconds) (int64 .leaseSeconds) -}}
{{- fail "leaderElection.deadlineSeconds must be less than leaderElection.leaseSeconds" -}}
{{- end -}}
{{- end -}}
{{- $ports := list (int64 .Values.health.port) -}}
{{- if .Values.metrics.enabled -}}{{- $ports = append $ports (int64 .Values.metrics.port) -}}{{- end -}}
{{- if .Values.page.enabled -}}{{- $ports = append $ports (int64 .Values.page.port) -}}{{- end -}}
{{- if ne (len $ports) (len (uniq $ports)) -}}
{{- fail "health.port, metrics.port and page.port must differ" -}}
{{- end -}}
{{- with .Values.metrics.workers -}}
{{- if and .enabled (has (.port | int64 | toString) (list "8080" "29400" "29500")) -}}
{{- fail (printf "metrics.workers.port %s is a port that workers use themselves: choose another" (.port | int64 | toString)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsFrom) -}}
{{- with .Values.metrics -}}
{{- if or (and .enabled .serviceMonitor.enabled) (and .workers.enabled .podMonitor.enabled) -}}
{{- fail "a metrics monitor is enabled, but the network policy lets nobody scrape: say in networkPolicy.metricsFrom who may, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.coordinatorTls (hasPrefix "http://" .Values.coordinatorUrl) -}}
{{- fail "coordinatorUrl begins with http://, but coordinators serve HTTPS: write {scheme}://, or coordinatorTls: false" -}}
{{- end -}}
{{- if and (not .Values.coordinatorTls) (hasPrefix "https://" .Values.coordinatorUrl) -}}
{{- fail "coordinatorUrl begins with https://, but coordinatorTls is false" -}}
{{- end -}}
{{- $former := "" -}}
{{- range .Values.metrics.priorities -}}
{{- if and $former (le (int64 .) (int64 $former)) -}}
{{- fail "metrics.priorities must ascend" -}}
{{- end -}}
{{- $former = int64 . | toString -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.models -}}
{{- if has .name $names -}}
{{- fail (printf "models: %s is defined twice" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- /* The API server would refuse these two when the first task asks for the model, and only the operator's log would say so. */ -}}
{{- if hasPrefix "hf://datasets/" .uri -}}
{{- fail (printf "models: %s: uri is that of a data set; a base model is hf://OWNER/NAME" .name) -}}
{{- end -}}
{{- with (mergeOverwrite (deepCopy $.Values.pipelineDefaults) .).replicas -}}
{{- if gt (default 1 .min | int64) (default 1 .max | int64) -}}
{{- fail "models: replicas.min must not be more than replicas.max" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "mlora.lease" -}}
{{- default (include "mlora.fullname" .) .Values.leaderElection.leaseName -}}
{{- end -}}

{{/*
The operator's settings as JSON, which YAML readers take as well. Not toYaml: it would write the number 1000000 as
1e+06, which is text to many YAML readers.
*/}}
{{- define "mlora.settings" -}}
{{- include "mlora.checked" . -}}
{{- $models := list -}}
{{- range .Values.models -}}
{{- $models = append $models (mergeOverwrite (deepCopy $.Values.pipelineDefaults) .) -}}
{{- end -}}
{{- $worker := dict
  "image" (include "mlora.image" (dict "image" .Values.worker.image "chart" .Chart))
  "imagePullPolicy" .Values.worker.image.pullPolicy
  "imagePullSecrets" .Values.imagePullSecrets
  "runAsUser" (ternary nil (.Values.worker.runAsUser | int64) (kindIs "invalid" .Values.worker.runAsUser)) -}}
{{- $scraped := list -}}
{{- if .Values.metrics.workers.enabled -}}
{{- $_ := set $worker "metricsPort" (.Values.metrics.workers.port | int64) -}}
{{- if .Values.networkPolicy.metricsFrom -}}
{{- $ports := list (dict "protocol" "TCP" "port" (.Values.metrics.workers.port | int64)) -}}
{{- $scraped = list (dict "from" .Values.networkPolicy.metricsFrom "ports" $ports) -}}
{{- end -}}
{{- end -}}
{{- $service := printf "%s-page" (include "mlora.fullname" . | trunc 58 | trimSuffix "-") -}}
{{- $inside := printf "%s.%s" $service .Release.Namespace -}}
{{- $hosts := concat .Values.page.hosts (list $service $inside (printf "%s.svc" $inside) (printf "%s.svc.cluster.local" $inside)) -}}
{{- $network := dict
  "enabled" .Values.networkPolicy.enabled
  "operatorLabels" (include "mlora.selector" . | fromYaml)
  "ports" .Values.networkPolicy.workerPorts
  "dnsPorts" .Values.networkPolicy.dnsPorts
  "ingress" $scraped
  "egress" .Values.networkPolicy.workerEgress -}}
{{- dict
  "namespace" .Release.Namespace
  "watchNamespaces" .Values.watchNamespaces
  "worker" $worker
  "models" $models
  "serving" .Values.serving
  "priorities" .Values.priorities
  "outputs" .Values.outputs
  "log" .Values.log
  "health" .Values.health
  "page" (dict "enabled" .Values.page.enabled "port" .Values.page.port "hosts" $hosts)
  "metrics" (pick .Values.metrics "enabled" "port" "tasks" "mostTasks" "priorities")
  "leaderElection" (merge (dict "leaseName" (include "mlora.lease" .)) .Values.leaderElection)
  "networkPolicy" $network
  "allowFileUris" .Values.allowFileUris
  "allowPrivateEndpoints" .Values.allowPrivateEndpoints
  "coordinatorTls" .Values.coordinatorTls
  "coordinatorUrl" .Values.coordinatorUrl
  | toPrettyJson -}}
{{- end -}}
