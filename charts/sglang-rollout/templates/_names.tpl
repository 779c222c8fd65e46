{{/* Name of the operator's objects: the release's, with the chart's where that does not say it. */}}
{{- define "sglang-rollout.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of what has no namespace: releases of one name in two namespaces must not meet. */}}
{{- define "sglang-rollout.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "sglang-rollout.name" .) -}}
{{- end -}}

{{/* Of the operator's pods; the NetworkPolicies of fleets let these in. */}}
{{- define "sglang-rollout.selectorLabels" -}}
app.kubernetes.io/name: sglang-rollout
app.kubernetes.io/component: operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sglang-rollout.labels" -}}
{{ include "sglang-rollout.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* (list . "agent"): the reference of one of our images. */}}
{{- define "sglang-rollout.image" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $images := $root.Values.images -}}
{{- $tag := $images.tag | default $root.Chart.AppVersion -}}
{{- $short := printf "sglang-rollout/%s:%s" $name $tag -}}
{{- index $images $name | default (ternary $short (printf "%s/%s" $images.registry $short) (empty $images.registry)) -}}
{{- end -}}
