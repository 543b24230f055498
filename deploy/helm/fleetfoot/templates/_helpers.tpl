{{- define "fleetfoot.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" (.Release.Name | trunc 40 | trimSuffix "-") .Chart.Name -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods which answer requests. */}}
{{- define "fleetfoot.selector" -}}
app.kubernetes.io/name: fleetfoot
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* A number or a text of the values as text: numbers are floats there, and large ones would be written as 1e+06. */}}
{{- define "fleetfoot.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ toString . }}{{ end -}}
{{- end -}}

{{- define "fleetfoot.labels" -}}
{{ include "fleetfoot.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- end -}}

{{- define "fleetfoot.secretVariable" -}}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef:
      name: {{ index . 1 | quote }}
      key: key
{{- end -}}

{{/* Arguments: (dict "root" $ "isWorker" bool) */}}
{{- define "fleetfoot.container" -}}
{{- $values := .root.Values -}}
- name: fleetfoot
  image: {{ printf "%s:%s" $values.image.repository (default .root.Chart.Version $values.image.tag) | quote }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  args:
    {{- with $values.model }}
    - {{ . | quote }}
    {{- end }}
    - --port={{ int $values.port }}
    - --shutdown-timeout={{ int $values.shutdownSeconds }}
    {{- with $values.servedModelNames }}
    - --served-model-name
    {{- range . }}
    - {{ . | quote }}
    {{- end }}
    {{- end }}
    {{- if $values.adminKeySecret }}
    - --enable-admin-routes
    {{- end }}
    {{- if gt (int $values.nodes) 1 }}
    - --nnodes=$(LWS_GROUP_SIZE)
    - --node-rank=$(LWS_WORKER_INDEX)
    - --master-addr=$(LWS_LEADER_ADDRESS)
    - --trusted-network
    {{- if .isWorker }}
    - --headless
    {{- end }}
    {{- end }}
    {{- if $values.kvEvents.enabled }}
    - {{ printf "--kv-events-config=%s" (dict "enable_kv_cache_events" true "endpoint" (printf "tcp://*:%d" (int $values.kvEvents.port)) "replay_endpoint" (printf "tcp://*:%d" (int $values.kvEvents.replayPort)) "topic" (printf "kv@$(POD_IP)@%s" (default $values.model (first (default (list "") $values.servedModelNames)))) | toJson) | quote }}
    {{- end }}
    {{- range $values.args }}
    - {{ include "fleetfoot.text" . | quote }}
    {{- end }}
  env:
    - name: POD_IP
      valueFrom:
        fieldRef:
          fieldPath: status.podIP
    - name: VLLM_NIXL_SIDE_CHANNEL_HOST
      value: $(POD_IP)
    {{- with $values.apiKeySecret }}
    {{- include "fleetfoot.secretVariable" (list "FLEETFOOT_API_KEY" .) | nindent 4 }}
    {{- end }}
    {{- with $values.adminKeySecret }}
    {{- include "fleetfoot.secretVariable" (list "FLEETFOOT_ADMIN_KEY" .) | nindent 4 }}
    {{- end }}
    {{- with $values.clusterKeySecret }}
    {{- include "fleetfoot.secretVariable" (list "FLEETFOOT_CLUSTER_KEY" .) | nindent 4 }}
    {{- end }}
    {{- with $values.hfTokenSecret }}
    {{- include "fleetfoot.secretVariable" (list "HF_TOKEN" .) | nindent 4 }}
    {{- end }}
    {{- with $values.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if not .isWorker }}
  ports:
    - name: http
      containerPort: {{ int $values.port }}
    {{- if $values.kvEvents.enabled }}
    - name: kv-events
      containerPort: {{ int $values.kvEvents.port }}
    - name: kv-replay
      containerPort: {{ int $values.kvEvents.replayPort }}
    {{- end }}
  startupProbe:
    httpGet: {path: /health, port: http}
    periodSeconds: 5
    failureThreshold: {{ div (add (int $values.startupSeconds) 4) 5 }}
  livenessProbe:
    httpGet: {path: /health, port: http}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    httpGet: {path: /ready, port: http}
    periodSeconds: 5
    timeoutSeconds: 5
  {{- end }}
  resources:
    {{- $gpus := ternary dict (dict $values.gpuResource (int $values.gpus)) (eq (int $values.gpus) 0) }}
    {{- $limits := merge (dict) (default dict $values.resources.limits) $gpus }}
    {{- toYaml (merge (dict "limits" $limits) $values.resources) | nindent 4 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    allowPrivilegeEscalation: false
    capabilities:
      drop: [ALL]
  volumeMounts:
    - {name: cache, mountPath: /cache}
    - {name: shared-memory, mountPath: /dev/shm}
    {{- with $values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Arguments: (dict "root" $ "isWorker" bool) */}}
{{- define "fleetfoot.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- $own := merge (dict "llm-d.ai/engine-type" "vllm") (include "fleetfoot.selector" $root | fromYaml) }}
    {{- if .isWorker }}
    {{- $own = dict "app.kubernetes.io/name" "fleetfoot-worker" "app.kubernetes.io/instance" $root.Release.Name }}
    {{- end }}
    {{- toYaml (merge $own $values.podLabels) | nindent 4 }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  terminationGracePeriodSeconds: {{ add (int $values.shutdownSeconds) 30 }}
  automountServiceAccountToken: false
  {{- with $values.serviceAccountName }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    fsGroup: 1000
    seccompProfile:
      type: RuntimeDefault
  containers:
    {{- include "fleetfoot.container" . | nindent 4 }}
  volumes:
    - name: cache
      {{- if or $values.cache.existingClaim $values.cache.size }}
      persistentVolumeClaim:
        claimName: {{ default (printf "%s-cache" (include "fleetfoot.name" $root)) $values.cache.existingClaim | quote }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ $values.sharedMemory | quote }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* An amount of Kubernetes, such as 500m or 16Gi, as a number that floats compare. */}}
{{- define "fleetfoot.amount" -}}
{{- $text := include "fleetfoot.text" . -}}
{{- $suffix := regexFind "([KMGTPE]i|[numkMGTPE])$" $text -}}
{{- $scale := get (dict "n" 1e-9 "u" 1e-6 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0) $suffix -}}
{{- printf "%.9f" (mulf (trimSuffix $suffix $text | float64) (default 1.0 $scale)) -}}
{{- end -}}

{{/* Pods that the chart makes, at most. */}}
{{- define "fleetfoot.pods" -}}
{{- mul (int .nodes) (ternary (int .autoscaling.maxReplicas) (int .replicas) .autoscaling.enabled) -}}
{{- end -}}

{{/* The ranks that arguments ask for; empty: the chart cannot tell, or they are elsewhere. */}}
{{- define "fleetfoot.ranks" -}}
{{- $factors := dict "tensor-parallel-size" 1 "pipeline-parallel-size" 1 "data-parallel-size" 1 -}}
{{- $short := dict "-tp" "tensor-parallel-size" "-pp" "pipeline-parallel-size" "-dp" "data-parallel-size" -}}
{{- $name := "" -}}
{{- $isKnown := true -}}
{{- range . -}}
{{- $word := include "fleetfoot.text" . -}}
{{- $parts := splitList "=" $word -}}
{{- if and $name (not (hasPrefix "-" $word)) -}}
{{- $_ := set $factors $name (int $word) -}}
{{- end -}}
{{- $name = get $short (first $parts) -}}
{{- if and (not $name) (hasPrefix "--" $word) -}}{{- $name = trimPrefix "--" (first $parts) | replace "_" "-" -}}{{- end -}}
{{- if or (has $name (list "config" "distributed-executor-backend" "executor")) (and (hasPrefix "data-parallel-" $name) (ne $name "data-parallel-size")) -}}{{- $isKnown = false -}}{{- end -}}
{{- if not (hasKey $factors $name) -}}{{- $name = "" -}}{{- else if gt (len $parts) 1 -}}{{- $_ := set $factors $name (int (last $parts)) -}}{{- end -}}
{{- end -}}
{{- if $isKnown -}}{{- mul (get $factors "tensor-parallel-size") (get $factors "pipeline-parallel-size") (get $factors "data-parallel-size") -}}{{- end -}}
{{- end -}}

{{/* Values that contradict each other, or what the chart makes of them. */}}
{{- define "fleetfoot.checks" -}}
{{- $values := .Values -}}
{{- if and (gt (int $values.nodes) 1) (not $values.clusterKeySecret) -}}
{{- fail "clusterKeySecret is empty, and nodes is above 1: machines prove a common secret to each other" -}}
{{- end -}}
{{- $flags := dict "host" "it is the address of the pod" -}}
{{- range list "ssl-keyfile" "ssl-certfile" "ssl-ca-certs" "uds" -}}{{- $_ := set $flags . "probes, routers and monitors ask http at the port" -}}{{- end -}}
{{- range $flag, $value := dict "port" "port" "shutdown-timeout" "shutdownSeconds" "nnodes" "nodes" "node-rank" "nodes" "master-addr" "nodes" "headless" "nodes" "api-key" "apiKeySecret" "admin-key" "adminKeySecret" -}}
{{- $_ := set $flags $flag (printf "use the value %s" $value) -}}
{{- end -}}
{{- if $values.model -}}{{- $_ := set $flags "model" "use the value model" -}}{{- end -}}
{{- if $values.servedModelNames -}}{{- $_ := set $flags "served-model-name" "use the value servedModelNames" -}}{{- end -}}
{{- if $values.kvEvents.enabled -}}{{- $_ := set $flags "kv-events-config" "use the value kvEvents" -}}{{- end -}}
{{- range $values.args -}}
{{- $flag := toString . | splitList "=" | first -}}
{{- $name := trimPrefix "--" $flag | replace "_" "-" -}}
{{- if and (hasPrefix "--" $flag) (hasKey $flags $name) -}}
{{- fail (printf "args has %q, which the chart decides: %s" (toString .) (get $flags $name)) -}}
{{- end -}}
{{- end -}}

{{- $used := list "POD_IP" "VLLM_NIXL_SIDE_CHANNEL_HOST" -}}
{{- range $name, $secret := dict "FLEETFOOT_API_KEY" "apiKeySecret" "FLEETFOOT_ADMIN_KEY" "adminKeySecret" "FLEETFOOT_CLUSTER_KEY" "clusterKeySecret" "HF_TOKEN" "hfTokenSecret" -}}
{{- if get $values $secret -}}{{- $used = append $used $name -}}{{- end -}}
{{- end -}}
{{- range $values.env -}}
{{- if has .name $used -}}{{- fail (printf "env has %s twice, or the chart sets it" .name) -}}{{- end -}}
{{- $used = append $used .name -}}
{{- end -}}

{{- $volumes := list "cache" "shared-memory" -}}
{{- range $values.extraVolumes -}}
{{- if has .name $volumes -}}{{- fail (printf "extraVolumes has %s twice, or it is a volume of the chart" .name) -}}{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- $paths := list "/cache" "/dev/shm" -}}
{{- range $values.extraVolumeMounts -}}
{{- if not (has .name $volumes) -}}{{- fail (printf "extraVolumeMounts has %s, and extraVolumes has not" .name) -}}{{- end -}}
{{- $path := clean .mountPath -}}
{{- if has $path $paths -}}{{- fail (printf "extraVolumeMounts has %s twice, or the chart mounts it" $path) -}}{{- end -}}
{{- $paths = append $paths $path -}}
{{- end -}}

{{- range $name, $amounts := $values.resources -}}
{{- if and (kindIs "map" $amounts) (hasKey $amounts $values.gpuResource) -}}
{{- fail (printf "resources.%s has %s; use the value gpus" $name $values.gpuResource) -}}
{{- end -}}
{{- end -}}
{{- $limits := default dict $values.resources.limits -}}
{{- range $name, $amount := default dict $values.resources.requests -}}
{{- if and (contains "/" $name) (ne (toString $amount) (toString (get $limits $name))) -}}
{{- fail (printf "resources.requests.%s is %s, and resources.limits.%s %s; of devices they must be the same number" $name (toString $amount) $name (default "not set" (get $limits $name) | toString)) -}}
{{- end -}}
{{- if hasKey $limits $name -}}
{{- $most := get $limits $name -}}
{{- if gt (include "fleetfoot.amount" $amount | float64) (include "fleetfoot.amount" $most | float64) -}}
{{- fail (printf "resources.requests.%s is %s, above resources.limits.%s %s; it can be at most as much" $name (toString $amount) $name (toString $most)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $ranks := include "fleetfoot.ranks" $values.args -}}
{{- $all := mul (int $values.gpus) (int $values.nodes) -}}
{{- if and $ranks $all (ne (int $ranks) (int $all)) -}}
{{- fail (printf "gpus is %d with %d nodes, and args have %s ranks (tensor, pipeline and data parallel sizes multiplied); a rank takes a GPU: use as many, such as --tensor-parallel-size=%d" (int $values.gpus) (int $values.nodes) $ranks $all) -}}
{{- end -}}
{{- with $values.cache -}}
{{- $pods := include "fleetfoot.pods" $values | int -}}
{{- if and .size (not .existingClaim) (gt $pods 1) (not (has "ReadWriteMany" .accessModes)) -}}
{{- fail (printf "cache.accessModes is %s, and %d pods share the claim; use ReadWriteMany, an existingClaim that all can mount, or no cache.size" (toJson .accessModes) $pods) -}}
{{- end -}}
{{- if and .existingClaim (or .size .storageClass) -}}
{{- fail (printf "cache.existingClaim is %s, and cache.size and cache.storageClass are of a claim to make" .existingClaim) -}}
{{- end -}}
{{- if and .storageClass (not .size) -}}{{- fail (printf "cache.storageClass is %s, and cache.size is empty" .storageClass) -}}{{- end -}}
{{- end -}}
{{- if and $values.autoscaling.enabled (gt (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas is %d, above autoscaling.maxReplicas %d" (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- with $values.kvEvents -}}
{{- if and .enabled (or (eq (int .port) (int .replayPort)) (has (int $values.port) (list (int .port) (int .replayPort)))) -}}
{{- fail "port, kvEvents.port and kvEvents.replayPort must be three different ports of the pod" -}}
{{- end -}}
{{- end -}}
{{- end -}}
