package rest

import (
	"net/http"

	"torpor/controlplane/reply"
)

// health says that the control plane serves. It needs no key and says nothing about sandboxes.
func (a *API) health(w http.ResponseWriter, _ *http.Request) error {
	reply.JSON(w, http.StatusOK, struct {
		Status  string `json:"status"`
		Version string `json:"version"`
	}{"ok", a.cfg.Version})
	return nil
}

type templateBody struct {
	TemplateID  string `json:"templateID"`
	Digest      string `json:"digest"`
	State       string `json:"state"` // building | ready | failed
	Error       string `json:"error"`
	CPUCount    uint32 `json:"cpuCount"`
	MemoryMB    uint64 `json:"memoryMB"`
	DiskSizeMB  uint64 `json:"diskSizeMB"`
	EnvdVersion string `json:"envdVersion"`
}

type nodeBody struct {
	NodeID    string         `json:"nodeID"`
	Reachable bool           `json:"reachable"`
	Error     string         `json:"error"`
	Version   string         `json:"version"`
	KVM       string         `json:"kvm"`
	Emulated  bool           `json:"emulated"`
	Templates []templateBody `json:"templates"`
}

// nodes answers what the nodes are; one that is away is listed as such.
func (a *API) nodes(w http.ResponseWriter, r *http.Request) error {
	node := nodeBody{Templates: []templateBody{}}
	about, err := a.node.Describe(r.Context())
	if err != nil {
		node.Error = err.Error()
	} else {
		node.NodeID, node.Reachable, node.Version = about.NodeId, true, about.Version
		node.KVM, node.Emulated = about.Kvm, about.Emulated
		templates, err := a.node.Templates(r.Context())
		if err != nil {
			return err
		}
		for _, t := range templates {
			node.Templates = append(node.Templates, templateBody{
				TemplateID: t.TemplateId, Digest: t.Digest, State: t.State, Error: t.Error, CPUCount: t.Vcpus,
				MemoryMB: t.MemoryBytes >> 20, DiskSizeMB: t.DiskBytes >> 20, EnvdVersion: t.EnvdVersion,
			})
		}
	}
	reply.JSON(w, http.StatusOK, struct {
		Nodes []nodeBody `json:"nodes"`
		Next  *string    `json:"next"`
	}{Nodes: []nodeBody{node}})
	return nil
}
