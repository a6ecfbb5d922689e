// Package e2b holds the wire shapes of the E2B control plane and proxy that Torpor serves: JSON structs, the signature of
// file URLs, and constants. There is no logic beyond what both the control plane and the agent must agree on.
package e2b

// ProxyError is the JSON body of the proxy's own answers on sandbox traffic.
type ProxyError struct {
	SandboxID string `json:"sandboxId"`
	Message   string `json:"message"`
	Port      uint16 `json:"port,omitempty"`
	Code      int    `json:"code"` // the HTTP status
}
