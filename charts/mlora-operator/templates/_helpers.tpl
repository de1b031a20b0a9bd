{{- define "mlora.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "mlora.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "mlora.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "mlora.selector" -}}
app.kubernetes.io/name: {{ include "mlora.name" . }}
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

{{- define "mlora.lease" -}}
{{- default (include "mlora.fullname" .) .Values.leaderElection.leaseName -}}
{{- end -}}

{{/*
The operator's settings as JSON, which YAML readers take as well. Not toYaml: it would write the number 1000000 as
1e+06, which is text to many YAML readers.
*/}}
{{- define "mlora.settings" -}}
{{- $models := list -}}
{{- range .Values.models -}}
{{- $models = append $models (mergeOverwrite (deepCopy $.Values.pipelineDefaults) .) -}}
{{- end -}}
{{- $worker := dict
  "image" (include "mlora.image" (dict "image" .Values.worker.image "chart" .Chart))
  "imagePullPolicy" .Values.worker.image.pullPolicy
  "imagePullSecrets" .Values.imagePullSecrets -}}
{{- $scraped := list -}}
{{- if .Values.metrics.workers.enabled -}}
{{- $_ := set $worker "metricsPort" (.Values.metrics.workers.port | int64) -}}
{{- if .Values.networkPolicy.metricsFrom -}}
{{- $ports := list (dict "protocol" "TCP" "port" (.Values.metrics.workers.port | int64)) -}}
{{- $scraped = list (dict "from" .Values.networkPolicy.metricsFrom "ports" $ports) -}}
{{- end -}}
{{- end -}}
{{- $network := dict
  "enabled" .Values.networkPolicy.enabled
  "operatorLabels" (include "mlora.selector" . | fromYaml)
  "ingress" $scraped
  "egress" .Values.networkPolicy.workerEgress -}}
{{- dict
  "namespace" .Release.Namespace
  "watchNamespaces" .Values.watchNamespaces
  "worker" $worker
  "models" $models
  "log" .Values.log
  "health" .Values.health
  "page" (pick .Values.page "enabled" "port")
  "metrics" (pick .Values.metrics "enabled" "port" "tasks" "mostTasks" "priorities")
  "leaderElection" (merge (dict "leaseName" (include "mlora.lease" .)) .Values.leaderElection)
  "networkPolicy" $network
  "allowFileUris" .Values.allowFileUris
  "allowPrivateEndpoints" .Values.allowPrivateEndpoints
  "coordinatorUrl" .Values.coordinatorUrl
  | toPrettyJson -}}
{{- end -}}
