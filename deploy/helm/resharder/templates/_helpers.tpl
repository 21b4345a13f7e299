{{- /* Labels of every resource. */ -}}
{{- define "resharder.labels" -}}
app.kubernetes.io/part-of: resharder
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "resharder.daemonLabels" -}}
app.kubernetes.io/name: resharderd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* Of one fleet: a dict of its `name` and the `root`. */ -}}
{{- define "resharder.fleetLabels" -}}
app.kubernetes.io/name: fleet
app.kubernetes.io/instance: {{ .root.Release.Name }}
resharder-fleet: {{ .name }}
{{- end -}}

{{- define "resharder.daemon" -}}
{{ .Release.Name }}-daemon
{{- end -}}

{{- /* The part of clients' names in certificates that tells releases apart. */ -}}
{{- define "resharder.domain" -}}
{{ .Release.Name }}.{{ .Release.Namespace }}
{{- end -}}

{{- /* The only user that shares memory with the daemon. */ -}}
{{- define "resharder.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "resharder.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* How a client reaches the daemon, with the certificate that is mounted at /tls. */ -}}
{{- define "resharder.clientEnv" -}}
- {name: RESHARDER_ENDPOINT, value: "{{ include "resharder.daemon" . }}.{{ .Release.Namespace }}:7677"}
- {name: RESHARDER_TLS_CA, value: /tls/ca.crt}
- {name: RESHARDER_TLS_CERT, value: /tls/tls.crt}
- {name: RESHARDER_TLS_KEY, value: /tls/tls.key}
{{- end -}}

{{- define "resharder.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
