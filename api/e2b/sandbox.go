package e2b

import (
	"encoding/json"
	"time"
)

// ClientID is the constant that the deprecated but required field clientID carries.
const ClientID = "torpor"

// NewSandbox is the body of POST /sandboxes and POST /v2/sandboxes. Absent fields are nil; what this version does not
// support is decoded too, so that it can be refused by name.
type NewSandbox struct {
	TemplateID          string            `json:"templateID"`
	Timeout             *int64            `json:"timeout"` // seconds
	Secure              *bool             `json:"secure"`  // v1 only
	AllowInternetAccess *bool             `json:"allow_internet_access"`
	Metadata            map[string]string `json:"metadata"`
	EnvVars             map[string]string `json:"envVars"`
	AutoPause           *bool             `json:"autoPause"`
	AutoPauseMemory     *bool             `json:"autoPauseMemory"`
	AutoResume          *AutoResume       `json:"autoResume"`
	Network             *Network          `json:"network"`
	MCP                 json.RawMessage   `json:"mcp"`
	IAM                 json.RawMessage   `json:"iam"`
	VolumeMounts        []json.RawMessage `json:"volumeMounts"`
}

// AutoResume says whether traffic wakes a paused sandbox.
type AutoResume struct {
	Enabled *bool `json:"enabled"` // required
}

// Network is the network configuration of a new sandbox.
type Network struct {
	AllowPublicTraffic *bool           `json:"allowPublicTraffic"`
	AllowOut           []string        `json:"allowOut"`
	DenyOut            []string        `json:"denyOut"`
	EgressProxy        json.RawMessage `json:"egressProxy"`
	MaskRequestHost    *string         `json:"maskRequestHost"`
	Rules              json.RawMessage `json:"rules"`
	HTTPSPorts         []int           `json:"httpsPorts"`
}

// ConnectSandbox is the body of connect (both generations) and of the deprecated resume.
type ConnectSandbox struct {
	Timeout   *int64 `json:"timeout"` // seconds
	Memory    *bool  `json:"memory"`
	AutoPause *bool  `json:"autoPause"` // resume only
}

// PauseSandbox is the optional body of pause.
type PauseSandbox struct {
	Memory *bool `json:"memory"`
}

// SetTimeout is the body of timeout.
type SetTimeout struct {
	Timeout *int64 `json:"timeout"` // seconds, required
}

// Refresh is the body of refreshes.
type Refresh struct {
	Duration *int64 `json:"duration"` // seconds
}

// Sandbox is the answer of create, connect and resume.
type Sandbox struct {
	SandboxID       string  `json:"sandboxID"`
	TemplateID      string  `json:"templateID"`
	ClientID        string  `json:"clientID"`
	EnvdVersion     string  `json:"envdVersion"`
	Alias           string  `json:"alias,omitempty"`
	EnvdAccessToken string  `json:"envdAccessToken,omitempty"`
	Domain          *string `json:"domain,omitempty"`
}

// ListedSandbox is one element of a list.
type ListedSandbox struct {
	TemplateID  string            `json:"templateID"`
	SandboxID   string            `json:"sandboxID"`
	ClientID    string            `json:"clientID"`
	Alias       string            `json:"alias,omitempty"`
	StartedAt   time.Time         `json:"startedAt"`
	EndAt       time.Time         `json:"endAt"` // the time of the pause when paused
	CPUCount    uint32            `json:"cpuCount"`
	MemoryMB    uint64            `json:"memoryMB"`
	DiskSizeMB  uint64            `json:"diskSizeMB"`
	Metadata    map[string]string `json:"metadata"`
	State       State             `json:"state"`
	EnvdVersion string            `json:"envdVersion"`
}

// SandboxDetail is the answer of GET for one sandbox.
type SandboxDetail struct {
	ListedSandbox
	EnvdAccessToken     string    `json:"envdAccessToken,omitempty"`
	Domain              *string   `json:"domain,omitempty"`
	AllowInternetAccess *bool     `json:"allowInternetAccess"`
	Lifecycle           Lifecycle `json:"lifecycle"`
}

// Lifecycle is what happens to a sandbox at its deadline and on traffic after it.
type Lifecycle struct {
	OnTimeout  string `json:"onTimeout"` // kill | pause
	AutoResume bool   `json:"autoResume"`
}

// State is the public state. E2B knows two; running means that the VM runs and envd is ready, paused is everything else.
type State string

// The public states.
const (
	Running State = "running"
	Paused  State = "paused"
)
